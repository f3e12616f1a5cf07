"""Scores of channel decays within chunks: what the serial loop of ``linear`` does not have to do.

A decay for each channel does not factor out of (Q K^T) * D, so that its scores take several
products for each chunk. They do not depend on the state: all chunks have theirs at once, ahead of
``linear.segment_output``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import features, load_keys
from linexport.plugins.kernels.sources.tiles import channel_logarithms, decayed_scores, load_keep


@triton.jit
def chunk_scores(
    query,
    key,
    decay,
    key_mask,
    parameter_0,
    channel_scores,
    length,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(Q K^T) * D of every chunk of an output head, (CHUNK, CHUNK) in float32, zero above.

    Grid: (B * output heads * chunks). A sum over d_k, in parts of BLOCK_K. CHUNK = 2^LEVELS.
    """
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    head = tl.program_id(0) // chunks
    start = tl.program_id(0) % chunks * CHUNK
    out = head % OUT
    h = out // GROUP
    row = (head // OUT).to(tl.int64) * length + start
    query += row * (QUERY_HEADS * WIDTH) + out * QUERY_HEADS // OUT * WIDTH
    key += row * (KEY_HEADS * WIDTH) + h * KEY_HEADS // HEADS * WIDTH
    decay += (row * HEADS + h) * D_K
    rows = tl.arange(0, CHUNK)
    live = start + rows < length
    keep = load_keep(key_mask + row if key_mask is not None else None, live)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for part in range(0, D_K, BLOCK_K):
        columns = part + tl.arange(0, BLOCK_K)
        q = features(
            query, live, columns, parameter_0, QUERY_HEADS * WIDTH, WIDTH, D_K, MAP, PRECISION
        )
        k = load_keys(
            key, keep, columns, parameter_0, KEY_HEADS * WIDTH, WIDTH, D_K, MAP, PRECISION
        )
        g = channel_logarithms(decay, keep, columns, HEADS * D_K, D_K)
        scores += decayed_scores(q, k, g, LEVELS, PRECISION)
    at = rows[:, None] * CHUNK + rows[None, :]
    tl.store(channel_scores + tl.program_id(0).to(tl.int64) * (CHUNK * CHUNK) + at, scores)
