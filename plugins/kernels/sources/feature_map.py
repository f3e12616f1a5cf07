"""Feature maps on their own: phi of every head of a packed tensor, or the logarithm of favor+."""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import exponents, features


@triton.jit
def apply(
    x,
    parameter_0,
    y,
    length,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    LOG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (B * HEADS * blocks of features, chunks)."""
    BLOCKS: tl.constexpr = tl.cdiv(FEATURES, BLOCK)
    head = tl.program_id(0) // BLOCKS
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    start = tl.program_id(1) * CHUNK
    row = (head // HEADS).to(tl.int64) * length + start
    rows = tl.arange(0, CHUNK)
    live = start + rows < length
    place = x + (row * HEADS + head % HEADS) * WIDTH
    STRIDE: tl.constexpr = HEADS * WIDTH
    if LOG:
        out = exponents(place, live, columns, parameter_0, STRIDE, WIDTH, FEATURES, PRECISION)
    else:
        out = features(place, live, columns, parameter_0, STRIDE, WIDTH, FEATURES, MAP, PRECISION)
    at = rows[:, None] * (HEADS * FEATURES) + columns[None, :]
    inside = live[:, None] & (columns < FEATURES)[None, :]
    place = y + (row * HEADS + head % HEADS) * FEATURES
    tl.store(place + at, out.to(y.dtype.element_ty), mask=inside)
