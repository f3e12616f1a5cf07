"""Operands of attention that are expressions of other tensors, written for the kernels of chunks.

A step computes them where it needs them (``recurrent``); many tokens have them in memory, each
computed once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.expressions import store_states, value


class Operand(NamedTuple):
    """An expression, AT its place in a program: WIDTH columns of each head, CHUNK times a block."""

    PROGRAM: tuple[int | float, ...]
    AT: int
    WIDTH: int
    HEADS: int
    CHUNK: int


@triton.jit
def store_rows(rows, tensors, batch, start, length, head, columns, of, REACH: tl.constexpr):
    """Write an expression, if there is one, to a head of ``rows`` (B, T, HEADS * WIDTH).

    In the first REACH times convolutions see their past; with 0 there are none.
    """
    if of.AT >= 0:
        rows += head * of.WIDTH + columns
        if REACH > 0:
            if start < REACH:
                store_each(rows, tensors, batch, start, length, head, columns, of, REACH)
            else:
                store_each(rows, tensors, batch, start, length, head, columns, of, 0)
        else:
            times = start + tl.arange(0, of.CHUNK)[:, None]
            live = times < length
            x = value(
                *(of.PROGRAM, of.AT, tensors, batch, times, live, length, head, columns),
                *(of.WIDTH, False),
            )
            x = (tl.zeros((of.CHUNK, columns.shape[1]), tl.float32) + x).to(rows.dtype.element_ty)
            place = rows + (batch * length + times) * (of.HEADS * of.WIDTH)
            tl.store(place, x, mask=live & (columns < of.WIDTH))


@triton.jit
def store_each(rows, tensors, batch, start, length, head, columns, of, REACH: tl.constexpr):
    """Write them time by time: taps, and inputs that several times see, are loaded once.

    All is computed before anything is stored: the compiler takes two loads of one place for one
    where nothing is stored between them.
    """
    found, first = (), start + tl.arange(0, 1)[:, None]
    for t in tl.static_range(of.CHUNK):
        times = first + t
        x = value(
            *(of.PROGRAM, of.AT, tensors, batch, times, times < length, length, head, columns),
            *(of.WIDTH, t < REACH),
        )
        found += ((tl.zeros((1, columns.shape[1]), tl.float32) + x).to(rows.dtype.element_ty),)
    for t in tl.static_range(of.CHUNK):
        times = first + t
        place = rows + (batch * length + times) * (of.HEADS * of.WIDTH)
        tl.store(place, found[t], mask=(times < length) & (columns < of.WIDTH))


@triton.jit
def write(
    tensors,
    operands,
    states,
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
    REACH: tl.constexpr,
):
    """Each operand that has a place in the program, and the states of convolutions.

    Grid: (B * chunks * PARTS, QUERY_HEADS + KEY_HEADS + HEADS). A program computes one head over
    CHUNK times. The blocks are wide enough for a head.
    """
    chunks *= PARTS
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    slot = tl.program_id(1)
    start = chunk * CHUNK
    columns_k, columns_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row_k, row_v = columns_k[None, :], columns_v[None, :]
    first = chunk == 0
    if slot < QUERY_HEADS:
        store_rows(
            *(operands.query, tensors, batch, start, length, slot, row_k),
            *(Operand(PROGRAM, PLACES[0], D_K, QUERY_HEADS, CHUNK), REACH),
        )
        if first:
            store_states(
                *(PROGRAM, QUERY_CONVOLUTIONS, tensors, states, batch, length, slot),
                *(columns_k, D_K, first),
            )
    elif slot < QUERY_HEADS + KEY_HEADS:
        head = slot - QUERY_HEADS
        store_rows(
            *(operands.key, tensors, batch, start, length, head, row_k),
            *(Operand(PROGRAM, PLACES[1], D_K, KEY_HEADS, CHUNK), REACH),
        )
        if first:
            store_states(
                *(PROGRAM, KEY_CONVOLUTIONS, tensors, states, batch, length, head),
                *(columns_k, D_K, first),
            )
    else:
        head = slot - QUERY_HEADS - KEY_HEADS
        store_rows(
            *(operands.value, tensors, batch, start, length, head, row_v),
            *(Operand(PROGRAM, PLACES[2], D_V, HEADS, CHUNK), REACH),
        )
        if first:
            store_states(
                *(PROGRAM, VALUE_CONVOLUTIONS, tensors, states, batch, length, head),
                *(columns_v, D_V, first),
            )
        one = tl.arange(0, 1)[None, :]
        store_rows(
            *(operands.decay, tensors, batch, start, length, head, row_k if DECAYS > 1 else one),
            *(Operand(PROGRAM, PLACES[3], DECAYS, HEADS, CHUNK), 0),
        )
        if head < BETA_HEADS:
            store_rows(
                *(operands.beta, tensors, batch, start, length, head, one),
                *(Operand(PROGRAM, PLACES[4], 1, BETA_HEADS, CHUNK), 0),
            )
