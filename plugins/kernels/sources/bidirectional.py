"""Non-causal linear attention: every token reads the state after the last one.

O = s Q S_T / (s Q z_T + eps)          the state by ``segments.segment_state`` and ``segment_scan``
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import HeadFeatures, features
from linexport.plugins.kernels.sources.tiles import (
    load_state,
    store_rows,
    times_state,
)


@triton.jit
def segment_output(
    query,
    parameter_0,
    output,
    present_state,
    present_normalizer,
    length,
    chunks_per_segment,
    HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of each segment. Grid: (B * output heads * tiles of d_v, segments)."""
    PARTS: tl.constexpr = tl.cdiv(D_K, BLOCK_K)
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    OUT: tl.constexpr = HEADS * tl.cdiv(QUERY_HEADS, HEADS)
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, D_K, PRECISION)
    tile = tl.program_id(0) % V_TILES
    head = tl.program_id(0) // V_TILES
    o_head = head % OUT
    columns_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.program_id(1) * chunks_per_segment * CHUNK
    batch = (head // OUT).to(tl.int64)
    row = batch * length + first
    state = batch * HEADS + o_head * HEADS // OUT
    past = present_state + state * (D_K * D_V)
    past_z = present_normalizer + state * D_K if present_normalizer is not None else None
    query += row * (QUERY_HEADS * WIDTH) + o_head * QUERY_HEADS // OUT * WIDTH
    output += (row * OUT + o_head) * D_V

    rows = tl.arange(0, CHUNK)
    last = tl.minimum(length - first, chunks_per_segment * CHUNK)
    for start in range(0, last, CHUNK):
        offset = tl.cast(start, tl.int64)
        live = start + rows < last
        place = query + offset * (QUERY_HEADS * WIDTH)
        # Numerator and denominator are sums over d_k, part by part.
        o = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        denominator = tl.zeros((CHUNK,), tl.float32)
        for p in range(PARTS):
            columns_k = p * BLOCK_K + tl.arange(0, BLOCK_K)
            S, z = load_state(past, past_z, columns_k, columns_v, D_K, D_V)
            q = features(place, live, columns_k, parameter_0, QUERY_HEADS * WIDTH, phi)
            o += times_state(q, S, PRECISION)
            denominator += tl.sum(q.to(tl.float32) * z[None, :], 1)
        o *= SCALE
        if present_normalizer is not None:
            o /= (denominator * SCALE + EPS)[:, None]
        store_rows(output + offset * (OUT * D_V), o, live, columns_v, OUT * D_V, D_V)
