"""Feature maps on their own: phi of every head of a packed tensor, or the logarithm of favor+."""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import HeadFeatures, exponents, features
from linexport.plugins.kernels.sources.tiles import store_rows


@triton.jit
def apply(
    x,
    parameter_0,
    y,
    length,
    chunks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    MAP: tl.constexpr,
    LOG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features (B, T, HEADS * FEATURES) of x (B, T, HEADS * WIDTH).

    A row is a head of a token: those of CHUNK tokens are one piece of memory. Grid: (B * chunks *
    blocks of ROWS of these * blocks of features).
    """
    BLOCKS: tl.constexpr = tl.cdiv(FEATURES, BLOCK)
    PARTS: tl.constexpr = tl.cdiv(CHUNK * HEADS, ROWS)
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, FEATURES, PRECISION)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(0) // BLOCKS
    start = part // PARTS % chunks * CHUNK
    rows = part % PARTS * ROWS + tl.arange(0, ROWS)
    live = rows < tl.minimum(length - start, CHUNK) * HEADS
    batch = (part // PARTS // chunks).to(tl.int64)
    row = (batch * length + start) * HEADS + part % PARTS * ROWS
    place = x + row * WIDTH
    if LOG:
        out = exponents(place, live, columns, parameter_0, WIDTH, phi)
    else:
        out = features(place, live, columns, parameter_0, WIDTH, phi)
    store_rows(y + row * FEATURES, out, live, columns, FEATURES, FEATURES)
