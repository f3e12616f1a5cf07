"""Decays of key channels: what the serial loops over chunks do not have to do.

A decay for each channel does not factor out of (Q K^T) * D, so that its scores take several
products for each chunk, and decayed queries and keys take exponentials of every channel. They do
not depend on the state: all chunks have theirs at once, and the loops of ``linear``, ``parts``,
``segments`` and ``transitions`` only load them. For notation see ``linear``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import HeadFeatures, features, load_keys
from linexport.plugins.kernels.sources.tiles import channel_logarithms, decayed_scores, load_keep


@triton.jit
def chunk_scores(
    query,
    key,
    decay,
    key_mask,
    parameter_0,
    channel_scores,
    query_from_start,
    key_from_start,
    key_to_end,
    chunk_decays,
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

    And Q * exp(L), (CHUNK, D_K) in the type of the features. The first query head of each state
    writes K * exp(L) on request, K * exp(L_C - L), alike, and exp(L_C), D_K in float32.
    Grid: (B * output heads * chunks). Sums over d_k go in parts of BLOCK_K. CHUNK = 2^LEVELS.
    """
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, D_K, PRECISION)
    head = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    start = chunk * CHUNK
    out = head % OUT
    h = out // GROUP
    row = (head // OUT).to(tl.int64) * length + start
    of_queries = tl.program_id(0).to(tl.int64)
    of_keys = (head // GROUP).to(tl.int64) * chunks + chunk
    query += row * (QUERY_HEADS * WIDTH) + out * QUERY_HEADS // OUT * WIDTH
    key += row * (KEY_HEADS * WIDTH) + h * KEY_HEADS // HEADS * WIDTH
    decay += (row * HEADS + h) * D_K
    rows = tl.arange(0, CHUNK)
    # Sums of g up to a token and after it as products with zeros and ones: see ``decayed_scores``.
    before = (rows[:, None] >= rows[None, :]).to(tl.float32)
    after = (rows[:, None] < rows[None, :]).to(tl.float32)
    live = start + rows < length
    keep = load_keep(key_mask + row if key_mask is not None else None, live)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for part in range(0, D_K, BLOCK_K):
        columns = part + tl.arange(0, BLOCK_K)
        q = features(query, live, columns, parameter_0, QUERY_HEADS * WIDTH, phi)
        k = load_keys(key, keep, columns, parameter_0, KEY_HEADS * WIDTH, phi)
        g = channel_logarithms(decay, keep, columns, HEADS * D_K, D_K)
        scores += decayed_scores(q, k, g, LEVELS, PRECISION)
        from_start = tl.exp(tl.dot(before, g, input_precision=PRECISION))
        to_end = tl.exp(tl.dot(after, g, input_precision=PRECISION))
        whole = tl.exp(tl.sum(g, 0))
        at = rows[:, None] * D_K + columns[None, :]
        inside = (columns < D_K)[None, :]
        first = inside & (out % GROUP == 0)
        q = (q.to(tl.float32) * from_start).to(q.dtype)
        tl.store(query_from_start + of_queries * (CHUNK * D_K) + at, q, mask=inside)
        if key_from_start is not None:
            stored = (k.to(tl.float32) * from_start).to(k.dtype)
            tl.store(key_from_start + of_keys * (CHUNK * D_K) + at, stored, mask=first)
        k = (k.to(tl.float32) * to_end).to(k.dtype)
        tl.store(key_to_end + of_keys * (CHUNK * D_K) + at, k, mask=first)
        inside = (columns < D_K) & (out % GROUP == 0)
        tl.store(chunk_decays + of_keys * D_K + columns, whole, mask=inside)
    at = rows[:, None] * CHUNK + rows[None, :]
    tl.store(channel_scores + of_queries * (CHUNK * CHUNK) + at, scores)
