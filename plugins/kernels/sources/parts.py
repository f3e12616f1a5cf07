"""Linear attention where a head is too wide for the registers of a block: d_k in parts.

Three products of TensorFloat-32 keep both operands twice, and maps that widen a head keep more
still. Here a block goes through d_k in parts of BLOCK_K, and holds one part of the queries, the
keys and the state at a time. The state is in global memory, and is continued there: in its slot of
``segment_states``, or as the present state. It is read and written once a chunk, and only by the
block that owns its columns. The formulas are those of ``linear``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.chunk import queries_of, store_output, tokens_of
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
    load_rows,
    load_square,
    load_state,
    pairs,
    store_part,
    times_rows,
    times_state,
)


@triton.jit
def in_parts(segment, state, z, spec):
    """Write the output of a segment that starts from ``state``, and that; return the last z."""
    PARTS: tl.constexpr = tl.cdiv(spec.D_K, spec.BLOCK_K)
    columns_v = segment.columns_v
    causal = segment.rows[:, None] >= segment.rows[None, :]
    for start in range(0, segment.tokens, spec.CHUNK):
        offset, live, keep = tokens_of(segment, start)
        keys = segment.key + offset * spec.KEYS
        u = load_rows(segment.value + offset * spec.VALUES, live, columns_v, spec.VALUES, spec.D_V)
        if spec.DECAYS == 1:
            place = segment.decay + offset * spec.HEADS
            from_start, to_end, whole, sums, rests, resets = head_decays(place, keep, spec.HEADS)
        # Delta rules, U = T (V - (K * exp(L)) S), summed over the parts of d_k.
        if segment.inverses is not None:
            stored = tl.zeros((spec.CHUNK, spec.BLOCK_V), tl.float32)
            for p in range(PARTS):
                columns = p * spec.BLOCK_K + tl.arange(0, spec.BLOCK_K)
                k = chunk_keys(
                    *(segment.key_from_start, segment.key, offset, keep, columns),
                    *(segment.parameter, spec.KEYS, spec.DECAYS, spec.phi),
                )
                S, _ = load_state(state, None, columns, columns_v, spec.D_K, spec.D_V)
                stored += times_state(k, S, spec.PRECISION)
            if spec.DECAYS == 1:
                stored *= from_start[:, None]
            T = load_square(segment.inverses + offset * spec.CHUNK, spec.CHUNK)
            kind = tl.float32 if spec.PAIRS else segment.value.dtype.element_ty
            u = written(T, u, stored, kind, spec.PRECISION)
        # Query heads that share this state, one after the other.
        for g in tl.static_range(spec.GROUP):
            queries = queries_of(segment, offset, g, spec)
            o = tl.zeros((spec.CHUNK, spec.BLOCK_V), tl.float32)
            if spec.DECAYS > 1:
                token = segment.chunks * g * spec.CHUNK + offset
                scores = load_square(segment.channel_scores + token * spec.CHUNK, spec.CHUNK)
            else:
                scores = tl.zeros((spec.CHUNK, spec.CHUNK), tl.float32)
            denominator = tl.zeros((spec.CHUNK,), tl.float32)
            # Scores, output from the past and denominator are all sums over d_k: part by part.
            for p in range(PARTS):
                columns = p * spec.BLOCK_K + tl.arange(0, spec.BLOCK_K)
                if spec.DECAYS > 1:
                    decayed = segment.query_from_start + token * spec.D_K
                    q = load_chunk(decayed, columns, spec.CHUNK, spec.D_K)
                else:
                    q = features(queries, live, columns, segment.parameter, spec.QUERIES, spec.phi)
                if spec.DECAYS <= 1 and not spec.PAIRS:
                    k = load_keys(keys, keep, columns, segment.parameter, spec.KEYS, spec.phi)
                    scores += tl.dot(q, tl.trans(k), input_precision=spec.PRECISION)
                S, _ = load_state(state, None, columns, columns_v, spec.D_K, spec.D_V)
                o += times_state(q, S, spec.PRECISION)
                if spec.NORMALIZE:
                    part = part_of(z, segment.columns_k, columns)
                    denominator += tl.sum(q.to(tl.float32) * part, 1)
            # Scores of the maps of degree two: the polynomial of q . k, once, not from features.
            if spec.DECAYS <= 1 and spec.PAIRS:
                wide = components(spec.WIDTH)
                raw_q = load_rows(queries, live, wide, spec.QUERIES, spec.WIDTH)
                raw_k = load_rows(keys, keep, wide, spec.KEYS, spec.WIDTH)
                t = tl.dot(raw_q, tl.trans(raw_k), input_precision=spec.PRECISION)
                scores = tl.where(keep[None, :], kappa(t, segment.parameter, spec.phi), 0.0)
            # Decays within the chunk, then the chunk's own values.
            if spec.DECAYS == 1:
                scores *= pairs(sums, rests, resets)
                o *= from_start[:, None]
                denominator *= from_start
            elif spec.DECAYS == 0:
                scores = tl.where(causal, scores, 0.0)
            o += times_rows(scores, u, spec.PRECISION)
            if spec.NORMALIZE:
                denominator += tl.sum(scores, 1)
                o = o * spec.SCALE / (denominator * spec.SCALE + spec.EPS)[:, None]
            else:
                o *= spec.SCALE
            store_output(segment, offset, g, o, live, spec)
        # Threads write what others read, before and after.
        tl.debug_barrier()
        # S' = exp(L_C) * S + (K * exp(L_C - L))^T U, read and written part by part.
        for p in range(PARTS):
            columns = p * spec.BLOCK_K + tl.arange(0, spec.BLOCK_K)
            k = chunk_keys(
                *(segment.key_to_end, segment.key, offset, keep, columns, segment.parameter),
                *(spec.KEYS, spec.DECAYS, spec.phi),
            )
            S, _ = load_state(state, None, columns, columns_v, spec.D_K, spec.D_V)
            factor = tl.full((spec.BLOCK_K,), 1.0, tl.float32)
            if spec.DECAYS == 1:
                k = faded(k, to_end, k.dtype)
                factor *= whole
            elif spec.DECAYS > 1:
                place = segment.chunk_decays + start // spec.CHUNK * spec.D_K + columns
                factor = tl.load(place, mask=columns < spec.D_K, other=0.0)
            if spec.DECAYS > 0:
                S *= factor[:, None]
            S += tl.dot(tl.trans(k), u.to(k.dtype), input_precision=spec.PRECISION)
            store_part(state, S, columns, columns_v, spec.D_K, spec.D_V)
            if spec.NORMALIZE:
                # z has no slices in registers: its part is selected and put back by comparison.
                all_k = segment.columns_k
                here = all_k[None, :] == columns[:, None]
                grown = tl.sum(part_of(z, all_k, columns), 0) * factor + tl.sum(k.to(tl.float32), 0)
                touched = (all_k >= p * spec.BLOCK_K) & (all_k < (p + 1) * spec.BLOCK_K)
                z = tl.where(touched, tl.sum(tl.where(here, grown[:, None], 0.0), 0), z)
        tl.debug_barrier()
    return z


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
