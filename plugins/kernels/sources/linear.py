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
(Q K^T) * D and queries and keys with their decays come from ``channels``. The chunks of a
segment are gone through by ``in_registers``, which holds all of d_k, or by ``parts``.
Source: docs/math.md, "Chunk form"; Yang et al. 2024 (arXiv 2312.06635), section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.chunk import (
    Spec,
    TokenSegment,
    queries_of,
    store_output,
    tokens_of,
)
from linexport.plugins.kernels.sources.delta import written
from linexport.plugins.kernels.sources.feature_functions import (
    HeadFeatures,
    chunk_keys,
    features,
    kappa,
)
from linexport.plugins.kernels.sources.parts import copy_state, in_parts
from linexport.plugins.kernels.sources.tiles import (
    after_chunk,
    components,
    first_column,
    from_state,
    head_decays,
    load_chunk,
    load_rows,
    load_square,
    load_state,
    pairs,
    store_state,
    times_rows,
    without_bytes,
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
    ``segment_states`` or the past, not both. All of d_k is held at once where BLOCK_K holds it.
    """
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    QUERIES: tl.constexpr = QUERY_HEADS * WIDTH
    KEYS: tl.constexpr = KEY_HEADS * WIDTH
    VALUES: tl.constexpr = HEADS * D_V
    OUTPUTS: tl.constexpr = OUT * D_V
    PAIRS: tl.constexpr = MAP == "taylor2" or MAP == "quadratic"
    WHOLE: tl.constexpr = BLOCK_K >= D_K
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, D_K, PRECISION)
    spec: tl.constexpr = Spec(
        *(HEADS, QUERY_HEADS, GROUP, OUT, WIDTH, D_K, D_V, QUERIES, KEYS, VALUES, OUTPUTS, DECAYS),
        *(NORMALIZE, SCALE, EPS, PRECISION, PAIRS, phi, BLOCK_K, BLOCK_V, CHUNK),
    )
    # Which columns of which state this program owns, and which part of the sequence.
    tile = tl.program_id(0) % V_TILES
    head = tl.program_id(0) // V_TILES
    index = tl.program_id(1)
    h = head % HEADS
    columns_k = tl.arange(0, max(triton.next_power_of_2(D_K), BLOCK_K))
    columns_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)

    # Pointers to the first token of the segment, of this head. Products of lengths and widths pass
    # 2^31 on long inputs, so rows count in 64 bits.
    first = index * chunks_per_segment * CHUNK
    row = (head // HEADS).to(tl.int64) * length + first
    query += row * QUERIES
    key += row * KEYS + h * KEY_HEADS // HEADS * WIDTH
    value += row * VALUES + h * D_V
    output += row * OUTPUTS
    if decay is not None:
        decay += (row * HEADS + h) * DECAYS
    if key_mask is not None:
        key_mask += row
    head = head.to(tl.int64)
    chunks = tl.cdiv(length, CHUNK)
    first_chunk = index * chunks_per_segment
    if not WHOLE:
        present = present_state + head * (D_K * D_V)
    # The state that the segment starts from: of ``segments``, or the past itself.
    if segment_states is not None:
        past = segment_states + (head * segments + index) * (D_K * D_V + D_K)
        past_z = past + D_K * D_V if NORMALIZE else None
    else:
        past = past_state + head * (D_K * D_V) if past_state is not None else None
        past_z = past_normalizer + head * D_K if past_normalizer is not None else None
    # In parts, it goes on where it lies: in its slot, or copied to the present state first. The
    # normaliser, one row, is in registers for all of d_k.
    if WHOLE:
        S, z = load_state(past, past_z, columns_k, columns_v, D_K, D_V)
    else:
        state = past
        if segment_states is None:
            state = present
            copy_state(past, state, columns_v, D_K, D_V, BLOCK_K)
        _, z = load_state(None, past_z, columns_k, columns_v, D_K, D_V)
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
    tokens = tl.minimum(length - first, chunks_per_segment * CHUNK)
    segment = TokenSegment(
        *(query, key, value, decay, key_mask, parameter_0, channel_scores, query_from_start),
        *(key_from_start, key_to_end, chunk_decays, inverses, output),
        *(h, columns_k, columns_v, chunks, rows, tokens),
    )
    if WHOLE:
        S, z = in_registers(segment, S, z, spec)
    else:
        z = in_parts(segment, state, z, spec)
    if index == segments - 1:
        if present_normalizer is not None:
            present_normalizer += head * D_K
        if WHOLE:
            present_state += head * (D_K * D_V)
            store_state(present_state, present_normalizer, S, z, columns_k, columns_v, D_K, D_V)
        else:
            if segment_states is not None:
                copy_state(state, present, columns_v, D_K, D_V, BLOCK_K)
            if present_normalizer is not None:
                tl.store(present_normalizer + columns_k, z, mask=(columns_k < D_K) & (tile == 0))


@triton.jit
def in_registers(segment, S, z, spec):
    """Write the output of a segment that starts from S and z; return those after it."""
    columns_k, columns_v = segment.columns_k, segment.columns_v
    causal = segment.rows[:, None] >= segment.rows[None, :]
    # The normaliser as the first column of a narrow state, whose values are ones: its sums are
    # products like the others, where reductions over a tile would pass through shared memory.
    if spec.NORMALIZE:
        one = first_column(spec.CHUNK, tl.float32 if spec.PAIRS else segment.key.dtype.element_ty)
        Z = z[:, None] * first_column(spec.BLOCK_K, tl.float32)
    for start in range(0, segment.tokens, spec.CHUNK):
        offset, live, keep = tokens_of(segment, start)
        if spec.GROUP > 1 and segment.key_mask is not None:
            keep = without_bytes(keep)
        u = load_rows(segment.value + offset * spec.VALUES, live, columns_v, spec.VALUES, spec.D_V)
        # Keys as the state after the chunk sees them, K * exp(L_C - L), where decays differ by
        # channel; one decay a token is as well one of its value, which is fewer columns.
        k = chunk_keys(
            *(segment.key_to_end, segment.key, offset, keep, columns_k, segment.parameter),
            *(spec.KEYS, spec.DECAYS, spec.phi),
        )
        k_rest = k
        from_start, to_end, whole = None, None, None
        if spec.DECAYS > 1:
            place = segment.chunk_decays + start // spec.CHUNK * spec.D_K + columns_k
            whole = tl.load(place, mask=columns_k < spec.D_K, other=0.0)[:, None]
        # Scores within the chunk are a polynomial of q . k itself: features would cancel.
        if spec.DECAYS <= 1 and spec.PAIRS:
            wide = components(spec.WIDTH)
            raw_k = load_rows(segment.key + offset * spec.KEYS, keep, wide, spec.KEYS, spec.WIDTH)
        if spec.DECAYS == 1:
            place = segment.decay + offset * spec.HEADS
            from_start, to_end, whole, sums, rests, resets = head_decays(place, keep, spec.HEADS)
        # Delta rules, U = T (V - (K * exp(L)) S): what the state has stored under these keys comes
        # off the values before they are written.
        if segment.inverses is not None:
            if spec.DECAYS > 1:
                place = segment.key_from_start + offset * spec.D_K
                k = load_chunk(place, columns_k, spec.CHUNK, spec.D_K)
            stored = from_state(k, S, from_start, spec.PRECISION)
            T = load_square(segment.inverses + offset * spec.CHUNK, spec.CHUNK)
            u = written(T, u, stored, k_rest.dtype, spec.PRECISION)
        # Query heads that share this state, one after the other.
        for g in range(spec.GROUP):
            queries = queries_of(segment, offset, g, spec)
            if spec.DECAYS <= 1:
                q = features(queries, live, columns_k, segment.parameter, spec.QUERIES, spec.phi)
            # (Q K^T) * D, the part within the chunk.
            if spec.DECAYS > 1:
                token = segment.chunks * g * spec.CHUNK + offset
                decayed = segment.query_from_start + token * spec.D_K
                q = load_chunk(decayed, columns_k, spec.CHUNK, spec.D_K)
                scores = load_square(segment.channel_scores + token * spec.CHUNK, spec.CHUNK)
            elif spec.PAIRS:
                raw_q = load_rows(queries, live, wide, spec.QUERIES, spec.WIDTH)
                t = tl.dot(raw_q, tl.trans(raw_k), input_precision=spec.PRECISION)
                scores = tl.where(keep[None, :], kappa(t, segment.parameter, spec.phi), 0.0)
            else:
                scores = tl.dot(q, tl.trans(k), input_precision=spec.PRECISION)
            if spec.DECAYS == 1:
                scores *= pairs(sums, rests, resets)
            elif spec.DECAYS == 0:
                scores = tl.where(causal, scores, 0.0)
            # The denominator, as the output: z in the place of S, ones for the values. It comes
            # first, since all products have their warps where the last in the source has them.
            if spec.NORMALIZE:
                denominator = from_state(q, Z, from_start, spec.PRECISION)
                denominator += times_rows(scores, one, spec.PRECISION)
            # O = (Q * exp(L)) S + scores U: the past, then the chunk itself.
            o = from_state(q, S, from_start, spec.PRECISION)
            o += times_rows(scores, u, spec.PRECISION)
            if spec.NORMALIZE:
                o = o * spec.SCALE / (tl.sum(denominator, 1) * spec.SCALE + spec.EPS)[:, None]
            else:
                o *= spec.SCALE
            store_output(segment, offset, g, o, live, spec)
        # z' = exp(L_C) * z + (K * exp(L_C - L))^T 1, and S' alike with U in the place of ones.
        if spec.NORMALIZE:
            Z = after_chunk(Z, whole, k_rest, one, to_end, spec.PRECISION)
        S = after_chunk(S, whole, k_rest, u, to_end, spec.PRECISION)

    if spec.NORMALIZE:
        z = tl.sum(Z, 1)
    return S, z
