"""Causal linear attention in chunks of C tokens: all update rules.

A sequence is cut into segments of whole chunks. With S the state before a chunk, L the sums of
decays in it and D_ts = exp(L_t - L_s) for s <= t, 0 otherwise:

    U   = V                                                linear, gated
    U   = T (V - (K * exp(L)) S)                           delta, gated delta; T from ``delta``
    O   = (Q * exp(L)) S + ((Q K^T) * D) U
    den = (Q * exp(L)) z + row sums of (Q K^T) * D
    S'  = exp(L_C) * S + (K * exp(L_C - L))^T U          z' = exp(L_C) * z + sum of K * exp(L_C - L)

``segments``, or ``transitions`` for the delta rules, gives the state before each segment, and
``segment_output`` runs all lines from there: two passes over keys and values for as many blocks as
there are segments. One segment needs this kernel only. Where every key channel has a decay,
(Q K^T) * D and queries and keys with their decays come from ``channels``.
Source: docs/math.md, "Chunk form"; Yang et al. 2024 (arXiv 2312.06635), section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.delta import written
from linexport.plugins.kernels.sources.feature_functions import chunk_keys, features, kappa
from linexport.plugins.kernels.sources.tiles import (
    components,
    faded,
    first_column,
    head_decays,
    load_chunk,
    load_keep,
    load_rows,
    load_square,
    load_state,
    pairs,
    store_rows,
    store_state,
    times_rows,
    times_state,
)


@triton.jit
def segment_output(
    query,
    key,
    value,
    decay,
    key_mask,
    parameter_0,
    past_state,
    past_normalizer,
    segment_states,
    channel_scores,
    query_from_start,
    key_from_start,
    key_to_end,
    chunk_decays,
    inverses,
    output,
    present_state,
    present_normalizer,
    length,
    segments,
    chunks_per_segment,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of each segment from the state before it; the last segment writes the present state.

    Grid: (B * HEADS * tiles of d_v, segments). A program serves all query heads of its state, so
    past and present state may be the same memory; the normaliser is shared by the tiles. Reads
    ``segment_states`` or the past, not both.
    """
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    QUERIES: tl.constexpr = QUERY_HEADS * WIDTH
    KEYS: tl.constexpr = KEY_HEADS * WIDTH
    # Which columns of which state this program owns, and which part of the sequence.
    tile = tl.program_id(0) % V_TILES
    head = tl.program_id(0) // V_TILES
    segment = tl.program_id(1)
    h = head % HEADS
    columns_k = tl.arange(0, BLOCK_K)
    columns_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)

    # Pointers to the first token of the segment, of this head. Products of lengths and widths pass
    # 2^31 on long inputs, so rows count in 64 bits.
    first = segment * chunks_per_segment * CHUNK
    row = (head // HEADS).to(tl.int64) * length + first
    query += row * QUERIES
    key += row * KEYS + h * KEY_HEADS // HEADS * WIDTH
    value += row * (HEADS * D_V) + h * D_V
    output += row * (OUT * D_V)
    if decay is not None:
        decay += (row * HEADS + h) * DECAYS
    if key_mask is not None:
        key_mask += row
    head = head.to(tl.int64)
    chunks = tl.cdiv(length, CHUNK)
    first_chunk = segment * chunks_per_segment
    # The state that the segment starts from: of ``segments``, or the past itself.
    if segment_states is not None:
        past = segment_states + (head * segments + segment) * (D_K * D_V + D_K)
        past_z = past + D_K * D_V if NORMALIZE else None
        S, z = load_state(past, past_z, columns_k, columns_v, D_K, D_V)
    else:
        past = past_state + head * (D_K * D_V) if past_state is not None else None
        past_z = past_normalizer + head * D_K if past_normalizer is not None else None
        S, z = load_state(past, past_z, columns_k, columns_v, D_K, D_V)
    if inverses is not None:
        inverses += (head * chunks + first_chunk) * (CHUNK * CHUNK)
    if channel_scores is not None:
        channel_scores += (head * GROUP * chunks + first_chunk) * (CHUNK * CHUNK)
        query_from_start += (head * GROUP * chunks + first_chunk) * (CHUNK * D_K)
        key_to_end += (head * chunks + first_chunk) * (CHUNK * D_K)
        chunk_decays += (head * chunks + first_chunk) * D_K
    if key_from_start is not None:
        key_from_start += (head * chunks + first_chunk) * (CHUNK * D_K)

    rows = tl.arange(0, CHUNK)
    causal = rows[:, None] >= rows[None, :]
    # The normaliser as the first column of a narrow state, whose values are ones: its sums are
    # products like the others, where reductions over a tile would pass through shared memory.
    if NORMALIZE:
        PAIRS: tl.constexpr = MAP == "taylor2" or MAP == "quadratic"
        one = first_column(CHUNK, tl.float32 if PAIRS else key.dtype.element_ty)
        Z = z[:, None] * first_column(BLOCK_K, tl.float32)
    # Tokens of the segment; the last chunk may be shorter than CHUNK.
    last = tl.minimum(length - first, chunks_per_segment * CHUNK)
    for start in range(0, last, CHUNK):
        offset = tl.cast(start, tl.int64)
        live = start + rows < last
        keep = load_keep(key_mask + offset if key_mask is not None else None, live)
        u = load_rows(value + offset * (HEADS * D_V), live, columns_v, HEADS * D_V, D_V)
        # Keys as the state after the chunk sees them, K * exp(L_C - L), where decays differ by
        # channel; one decay a token is as well one of its value, which is fewer columns.
        k = chunk_keys(
            key_to_end, key, offset, keep, columns_k, parameter_0, KEYS, WIDTH,
            D_K, CHUNK, DECAYS, MAP, PRECISION,
        )  # fmt: skip
        k_rest = k
        if DECAYS > 1:
            place = chunk_decays + start // CHUNK * D_K + columns_k
            whole = tl.load(place, mask=columns_k < D_K, other=0.0)
        # Scores within the chunk are a polynomial of q . k itself: features would cancel.
        if DECAYS <= 1 and (MAP == "taylor2" or MAP == "quadratic"):
            parts = components(WIDTH)
            raw_k = load_rows(key + offset * KEYS, keep, parts, KEYS, WIDTH)
        to_end = None
        if DECAYS == 1:
            place = decay + offset * HEADS
            from_start, to_end, whole, sums, rests, resets = head_decays(place, keep, HEADS)
        # Delta rules, U = T (V - (K * exp(L)) S): what the state has stored under these keys comes
        # off the values before they are written.
        if inverses is not None:
            if DECAYS > 1:
                k = load_chunk(key_from_start + offset * D_K, columns_k, CHUNK, D_K)
            stored = times_state(k, S, PRECISION)
            if DECAYS == 1:
                stored *= from_start[:, None]
            T = load_square(inverses + offset * CHUNK, CHUNK)
            u = written(T, u, stored, k_rest.dtype, PRECISION)
        for g in range(GROUP):
            # Query heads that share this state, one after the other.
            query_head = (h * GROUP + g) * QUERY_HEADS // OUT
            queries = query + offset * QUERIES + query_head * WIDTH
            if DECAYS <= 1:
                q = features(
                    queries, live, columns_k, parameter_0, QUERIES, WIDTH, D_K, MAP, PRECISION
                )
            # (Q K^T) * D, the part within the chunk.
            if DECAYS > 1:
                token = chunks * g * CHUNK + offset
                q = load_chunk(query_from_start + token * D_K, columns_k, CHUNK, D_K)
                scores = load_square(channel_scores + token * CHUNK, CHUNK)
            elif MAP == "taylor2" or MAP == "quadratic":
                raw_q = load_rows(queries, live, parts, QUERIES, WIDTH)
                t = tl.dot(raw_q, tl.trans(raw_k), input_precision=PRECISION)
                scores = tl.where(keep[None, :], kappa(t, parameter_0, WIDTH, MAP), 0.0)
            else:
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if DECAYS == 1:
                scores *= pairs(sums, rests, resets)
            elif DECAYS == 0:
                scores = tl.where(causal, scores, 0.0)
            # The denominator, as the output: z in the place of S, ones for the values. It comes
            # first, since all products have their warps where the last in the source has them.
            if NORMALIZE:
                denominator = times_state(q, Z, PRECISION)
                if DECAYS == 1:
                    denominator *= from_start[:, None]
                denominator += times_rows(scores, one, PRECISION)
            # O = (Q * exp(L)) S + scores U: the past, then the chunk itself.
            o = times_state(q, S, PRECISION)
            if DECAYS == 1:
                o *= from_start[:, None]
            o += times_rows(scores, u, PRECISION)
            if NORMALIZE:
                o = o * SCALE / (tl.sum(denominator, 1) * SCALE + EPS)[:, None]
            else:
                o *= SCALE
            written_at = output + offset * (OUT * D_V) + (h * GROUP + g) * D_V
            store_rows(written_at, o, live, columns_v, OUT * D_V, D_V)
        # z' = exp(L_C) * z + (K * exp(L_C - L))^T 1, and S' alike with U in the place of ones.
        if DECAYS > 1:
            whole = whole[:, None]
        if NORMALIZE:
            one_rest = faded(one, to_end, k_rest.dtype)
            if DECAYS:
                Z *= whole
            Z += tl.dot(tl.trans(k_rest), one_rest, input_precision=PRECISION)
        u_rest = faded(u, to_end, k_rest.dtype)
        if DECAYS:
            S *= whole
        S += tl.dot(tl.trans(k_rest), u_rest, input_precision=PRECISION)

    if NORMALIZE:
        z = tl.sum(Z, 1)
    if segment == segments - 1:
        present_state += head * (D_K * D_V)
        if present_normalizer is not None:
            present_normalizer += head * D_K
        store_state(present_state, present_normalizer, S, z, columns_k, columns_v, D_K, D_V)
