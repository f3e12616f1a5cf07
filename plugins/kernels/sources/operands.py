"""Operands of attention that are expressions of other tensors, written for the kernels of chunks.

A step computes them where it needs them (``recurrent``); many tokens have them in memory, each
computed once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.expressions import store_states
from linexport.plugins.kernels.sources.expressions import value as value_of


@triton.jit
def store_rows(
    rows,
    PROGRAM: tl.constexpr,
    AT: tl.constexpr,
    tensors,
    batch,
    times,
    length,
    head,
    columns,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write an expression, if there is one, to a head of ``rows`` (B, T, HEADS * WIDTH)."""
    if AT >= 0:
        live = times < length
        x = value_of(PROGRAM, AT, tensors, batch, times, live, length, head, columns, WIDTH)
        place = ((batch * length + times) * HEADS + head) * WIDTH + columns
        x = (tl.zeros((times.shape[0], columns.shape[1]), tl.float32) + x).to(rows.dtype.element_ty)
        tl.store(rows + place, x, mask=live & (columns < WIDTH))


@triton.jit
def write(
    x0,
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    x8,
    x9,
    x10,
    x11,
    x12,
    x13,
    x14,
    x15,
    query,
    key,
    value,
    decay,
    beta,
    present_conv_0,
    present_conv_1,
    present_conv_2,
    length,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    BETA_HEADS: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAM: tl.constexpr,
    PLACES: tl.constexpr,
    QUERY_CONVOLUTIONS: tl.constexpr,
    KEY_CONVOLUTIONS: tl.constexpr,
    VALUE_CONVOLUTIONS: tl.constexpr,
):
    """Each operand that has a place in the program, and the states of convolutions.

    Grid: (B * chunks * PARTS, QUERY_HEADS + KEY_HEADS + HEADS). A program computes one head over
    CHUNK times. The blocks are wide enough for a head.
    """
    chunks *= PARTS
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    slot = tl.program_id(1)
    times = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    columns_k, columns_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row_k, row_v = columns_k[None, :], columns_v[None, :]
    tensors = (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)
    states = (present_conv_0, present_conv_1, present_conv_2)
    first = chunk == 0
    if slot < QUERY_HEADS:
        store_rows(
            *(query, PROGRAM, PLACES[0], tensors, batch, times, length, slot, row_k),
            *(D_K, QUERY_HEADS),
        )
        store_states(
            *(PROGRAM, QUERY_CONVOLUTIONS, tensors, states, batch, length, slot),
            *(columns_k, D_K, first),
        )
    elif slot < QUERY_HEADS + KEY_HEADS:
        head = slot - QUERY_HEADS
        store_rows(
            *(key, PROGRAM, PLACES[1], tensors, batch, times, length, head, row_k),
            *(D_K, KEY_HEADS),
        )
        store_states(
            *(PROGRAM, KEY_CONVOLUTIONS, tensors, states, batch, length, head),
            *(columns_k, D_K, first),
        )
    else:
        head = slot - QUERY_HEADS - KEY_HEADS
        store_rows(
            *(value, PROGRAM, PLACES[2], tensors, batch, times, length, head, row_v),
            *(D_V, HEADS),
        )
        store_states(
            *(PROGRAM, VALUE_CONVOLUTIONS, tensors, states, batch, length, head),
            *(columns_v, D_V, first),
        )
        one = tl.arange(0, 1)[None, :]
        store_rows(
            *(decay, PROGRAM, PLACES[3], tensors, batch, times, length, head),
            *(row_k if DECAYS > 1 else one, DECAYS, HEADS),
        )
        if head < BETA_HEADS:
            store_rows(
                *(beta, PROGRAM, PLACES[4], tensors, batch, times, length, head, one),
                *(1, BETA_HEADS),
            )
