"""Linear attention where a head is too wide for the registers of a block: d_k in parts.

Three products of TensorFloat-32 keep both operands twice, and maps that widen a head keep more
still. Here a block goes through d_k in parts of BLOCK_K, and holds one part of the queries, the
keys and the state at a time. The state stays in memory, where it is continued from: in its slot of
``segment_states``, or as the present state. It is read and written once a chunk, and only by the
block that owns its columns. The formulas are those of ``linear``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.delta import written
from linexport.plugins.kernels.sources.feature_functions import (
    chunk_keys,
    features,
    kappa,
    load_keys,
)
from linexport.plugins.kernels.sources.tiles import (
    components,
    faded,
    head_decays,
    load_chunk,
    load_keep,
    load_rows,
    load_square,
    load_state,
    pairs,
    store_part,
    store_rows,
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
    """``linear.segment_output`` for keys that are held in parts of d_k."""
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    QUERIES: tl.constexpr = QUERY_HEADS * WIDTH
    KEYS: tl.constexpr = KEY_HEADS * WIDTH
    PARTS: tl.constexpr = tl.cdiv(D_K, BLOCK_K)
    PAIRS: tl.constexpr = MAP == "taylor2" or MAP == "quadratic"
    KAPPA: tl.constexpr = PAIRS and DECAYS <= 1
    # Which columns of which state this program owns, and which part of the sequence.
    tile = tl.program_id(0) % V_TILES
    head = tl.program_id(0) // V_TILES
    segment = tl.program_id(1)
    h = head % HEADS
    columns_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    all_k = tl.arange(0, triton.next_power_of_2(D_K))

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
    # The state is continued where it lies: in its slot, or copied to the present state first. The
    # normaliser, one row, stays in registers for all of d_k.
    present = present_state + head * (D_K * D_V)
    z = tl.zeros((all_k.shape[0],), tl.float32)
    if segment_states is not None:
        state = segment_states + (head * segments + segment) * (D_K * D_V + D_K)
        if NORMALIZE:
            z += tl.load(state + D_K * D_V + all_k, mask=all_k < D_K, other=0.0)
    else:
        state = present
        past = past_state + head * (D_K * D_V) if past_state is not None else None
        copy_state(past, state, columns_v, D_K, D_V, BLOCK_K)
        if past_normalizer is not None:
            z += tl.load(past_normalizer + head * D_K + all_k, mask=all_k < D_K, other=0.0)
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
    # Tokens of the segment; the last chunk may be shorter than CHUNK.
    last = tl.minimum(length - first, chunks_per_segment * CHUNK)
    for start in range(0, last, CHUNK):
        offset = tl.cast(start, tl.int64)
        live = start + rows < last
        keep = load_keep(key_mask + offset if key_mask is not None else None, live)
        keys = key + offset * KEYS
        decays = decay + offset * (HEADS * DECAYS) if decay is not None else None
        u = load_rows(value + offset * (HEADS * D_V), live, columns_v, HEADS * D_V, D_V)
        if DECAYS == 1:
            from_start, to_end, whole, sums, rests, resets = head_decays(decays, keep, HEADS)
        # Delta rules, U = T (V - (K * exp(L)) S), summed over the parts of d_k.
        if inverses is not None:
            stored = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            for p in range(PARTS):
                columns = p * BLOCK_K + tl.arange(0, BLOCK_K)
                k = chunk_keys(
                    key_from_start, key, offset, keep, columns, parameter_0, KEYS, WIDTH,
                    D_K, CHUNK, DECAYS, MAP, PRECISION,
                )  # fmt: skip
                S, _ = load_state(state, None, columns, columns_v, D_K, D_V)
                stored += times_state(k, S, PRECISION)
            if DECAYS == 1:
                stored *= from_start[:, None]
            T = load_square(inverses + offset * CHUNK, CHUNK)
            kind = tl.float32 if PAIRS else value.dtype.element_ty
            u = written(T, u, stored, kind, PRECISION)
        for g in tl.static_range(GROUP):
            # Query heads that share this state, one after the other.
            query_head = (h * GROUP + g) * QUERY_HEADS // OUT
            queries = query + offset * QUERIES + query_head * WIDTH
            o = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            if DECAYS > 1:
                token = chunks * g * CHUNK + offset
                scores = load_square(channel_scores + token * CHUNK, CHUNK)
            else:
                scores = tl.zeros((CHUNK, CHUNK), tl.float32)
            denominator = tl.zeros((CHUNK,), tl.float32)
            # Scores, output from the past and denominator are all sums over d_k: part by part.
            for p in range(PARTS):
                columns = p * BLOCK_K + tl.arange(0, BLOCK_K)
                if DECAYS > 1:
                    q = load_chunk(query_from_start + token * D_K, columns, CHUNK, D_K)
                else:
                    q = features(
                        queries, live, columns, parameter_0, QUERIES, WIDTH, D_K, MAP, PRECISION
                    )
                if DECAYS <= 1 and not PAIRS:
                    k = load_keys(
                        keys, keep, columns, parameter_0, KEYS, WIDTH, D_K, MAP, PRECISION
                    )
                    scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
                S, _ = load_state(state, None, columns, columns_v, D_K, D_V)
                o += times_state(q, S, PRECISION)
                if NORMALIZE:
                    denominator += tl.sum(q.to(tl.float32) * part_of(z, all_k, columns), 1)
            # Scores of the maps of degree two: the polynomial of q . k, once, not from features.
            if KAPPA:
                wide = components(WIDTH)
                raw_q = load_rows(queries, live, wide, QUERIES, WIDTH)
                raw_k = load_rows(keys, keep, wide, KEYS, WIDTH)
                t = tl.dot(raw_q, tl.trans(raw_k), input_precision=PRECISION)
                scores = tl.where(keep[None, :], kappa(t, parameter_0, WIDTH, MAP), 0.0)
            # Decays within the chunk, then the chunk's own values.
            if DECAYS == 1:
                scores *= pairs(sums, rests, resets)
                o *= from_start[:, None]
                denominator *= from_start
            elif DECAYS == 0:
                scores = tl.where(causal, scores, 0.0)
            o += times_rows(scores, u, PRECISION)
            if NORMALIZE:
                denominator += tl.sum(scores, 1)
                o = o * SCALE / (denominator * SCALE + EPS)[:, None]
            else:
                o *= SCALE
            place = output + offset * (OUT * D_V) + (h * GROUP + g) * D_V
            store_rows(place, o, live, columns_v, OUT * D_V, D_V)
        # Threads write what others read, before and after.
        tl.debug_barrier()
        # S' = exp(L_C) * S + (K * exp(L_C - L))^T U, read and written part by part.
        for p in range(PARTS):
            columns = p * BLOCK_K + tl.arange(0, BLOCK_K)
            k = chunk_keys(
                key_to_end, key, offset, keep, columns, parameter_0, KEYS, WIDTH,
                D_K, CHUNK, DECAYS, MAP, PRECISION,
            )  # fmt: skip
            S, _ = load_state(state, None, columns, columns_v, D_K, D_V)
            factor = tl.full((BLOCK_K,), 1.0, tl.float32)
            if DECAYS == 1:
                k = faded(k, to_end, k.dtype)
                factor *= whole
            elif DECAYS > 1:
                decayed = chunk_decays + start // CHUNK * D_K + columns
                factor = tl.load(decayed, mask=columns < D_K, other=0.0)
            if DECAYS > 0:
                S *= factor[:, None]
            S += tl.dot(tl.trans(k), u.to(k.dtype), input_precision=PRECISION)
            store_part(state, S, columns, columns_v, D_K, D_V)
            if NORMALIZE:
                # z has no slices in registers: its part is selected and put back by comparison.
                here = all_k[None, :] == columns[:, None]
                grown = tl.sum(part_of(z, all_k, columns), 0) * factor + tl.sum(k.to(tl.float32), 0)
                touched = (all_k >= p * BLOCK_K) & (all_k < (p + 1) * BLOCK_K)
                z = tl.where(touched, tl.sum(tl.where(here, grown[:, None], 0.0), 0), z)
        tl.debug_barrier()

    if segment == segments - 1:
        if segment_states is not None:
            copy_state(state, present, columns_v, D_K, D_V, BLOCK_K)
        if present_normalizer is not None:
            place = present_normalizer + head * D_K + all_k
            tl.store(place, z, mask=(all_k < D_K) & (tile == 0))


@triton.jit
def part_of(z, all_k, columns):
    """Columns of z that belong to a part, as a row (1, BLOCK_K)."""
    here = all_k[:, None] == columns[None, :]
    return tl.sum(tl.where(here, z[:, None], 0.0), 0)[None, :]


@triton.jit
def copy_state(
    source, target, columns_v, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Columns of a state, zero where there is none; they may be the same memory."""
    for p in range(tl.cdiv(D_K, BLOCK_K)):
        columns = p * BLOCK_K + tl.arange(0, BLOCK_K)
        S, _ = load_state(source, None, columns, columns_v, D_K, D_V)
        store_part(target, S, columns, columns_v, D_K, D_V)
    tl.debug_barrier()
