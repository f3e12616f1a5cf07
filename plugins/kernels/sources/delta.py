"""The delta rules in chunks: what each chunk needs before its state is known.

Within a chunk the rule is a triangular system. With A_ts = beta_t (k_t . k_s) D_ts for s < t:

    U = (I + A)^-1 diag(beta) (V - (K * exp(L)) S) = T (V - (K * exp(L)) S)

T does not depend on S, so that all chunks are solved at once, ahead of ``transitions`` and of
``linear.segment_output``.
With X the inverse of the diagonal blocks of size w and A_w the part of A that joins two of them,
X - X A_w X inverts the blocks of size 2w: as accurate as forward substitution, in log2(C) steps.
Source: the WY form of Yang et al. 2024 (arXiv 2406.06484, 2412.06464).
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import HeadFeatures, load_keys
from linexport.plugins.kernels.sources.tiles import (
    channel_logarithms,
    decayed_scores,
    head_decays,
    load_keep,
    pairs,
    times_rows,
)


@triton.jit
def chunk_inverse(
    key,
    decay,
    beta,
    key_mask,
    parameter_0,
    inverses,
    length,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    BETA_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_K: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """T of every chunk, (CHUNK, CHUNK) in float32. Grid: (B * HEADS * chunks). CHUNK = 2^LEVELS."""
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, D_K, PRECISION)
    head = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    h = head % HEADS
    start = chunk * CHUNK
    row = (head // HEADS).to(tl.int64) * length + start
    rows = tl.arange(0, CHUNK)
    live = start + rows < length
    keep = load_keep(key_mask + row if key_mask is not None else None, live)
    # A = beta_t (k_t . k_s) D_ts; what lies above the diagonal is never read.
    A = tl.zeros((CHUNK, CHUNK), tl.float32)
    for part in range(0, D_K, BLOCK_K):
        columns = part + tl.arange(0, BLOCK_K)
        place = key + row * (KEY_HEADS * WIDTH) + h * KEY_HEADS // HEADS * WIDTH
        k = load_keys(place, keep, columns, parameter_0, KEY_HEADS * WIDTH, phi)
        if DECAYS > 1:
            place = decay + (row * HEADS + h) * D_K
            g = channel_logarithms(place, keep, columns, HEADS * D_K, D_K)
            A += decayed_scores(k, k, g, LEVELS, PRECISION)
        else:
            A += tl.dot(k, tl.trans(k), input_precision=PRECISION)
    if DECAYS == 1:
        place = decay + row * HEADS + h
        _, _, _, sums, rests, resets = head_decays(place, keep, HEADS)
        A *= pairs(sums, rests, resets)
    place = beta + row * BETA_HEADS + h * BETA_HEADS // HEADS
    step = tl.load(place + rows * BETA_HEADS, mask=live, other=0.0).to(tl.float32)
    A *= step[:, None]

    # X inverts the diagonal blocks of I + A of size 2^level, at first 1; ``joins`` is where two
    # neighbours of them meet below the diagonal.
    X = (rows[:, None] == rows[None, :]).to(tl.float32)
    for level in tl.static_range(LEVELS):
        row_block, column_block = rows[:, None] >> level, rows[None, :] >> level
        joins = (row_block >> 1 == column_block >> 1) & (row_block > column_block)
        joined = tl.where(joins, A, 0.0)
        X -= tl.dot(tl.dot(X, joined, input_precision=PRECISION), X, input_precision=PRECISION)
    # T = (I + A)^-1 diag(beta).
    X *= step[None, :]
    at = rows[:, None] * CHUNK + rows[None, :]
    tl.store(inverses + (head.to(tl.int64) * chunks + chunk) * (CHUNK * CHUNK) + at, X)


@triton.jit
def written(T, values, stored, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """U = T (V - what the state has stored under the keys), in ``dtype``: what is written to it."""
    return times_rows(T, (values.to(tl.float32) - stored).to(dtype), PRECISION).to(dtype)
