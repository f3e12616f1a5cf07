"""The delta rules over segments of a sequence at once: what a segment does to a state.

A chunk takes a state S to exp(L_C) * S + (K * exp(L_C - L))^T T (V - (K * exp(L)) S), which is
affine in S (for notation see ``linear`` and ``delta``). So is a segment of chunks:

    S_after = M S_before + N

N is what the segment makes of the state zero, and the columns of M are what it makes of those of
the identity where all values are zero: ``segment_transition`` runs the chunks over both, every
segment and every tile of columns on its own. ``transition_scan`` goes through the segments, one
product of d_k x d_k by d_k x d_v for each, and leaves the state before each segment for
``linear.segment_output``.

Slot g of segment g holds the transition of segment g - 1: N, in ``segment_states``, and M. Segment
0 has none before it: its slot holds the past. Slots of states are (D_K, D_V), then D_K values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.delta import written
from linexport.plugins.kernels.sources.feature_functions import HeadFeatures, chunk_keys
from linexport.plugins.kernels.sources.tiles import (
    components,
    faded,
    head_decays,
    load_chunk,
    load_keep,
    load_rows,
    load_square,
    load_state,
    store_part,
    times_state,
)


@triton.jit
def under_keys(k, S, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """k S in float32, the sum of products over parts of BLOCK_K rows of S.

    Warps share the parts of one product with a dimension more, and hold the operands of their own.
    Of a single part each holds all: a chunk has too few rows to be shared.
    """
    PARTS: tl.constexpr = S.shape[0] // BLOCK_K
    if PARTS == 1:
        return times_state(k, S, PRECISION)
    else:
        keys = tl.permute(tl.reshape(k, (k.shape[0], PARTS, BLOCK_K)), (1, 0, 2))
        return tl.sum(times_state(keys, tl.reshape(S, (PARTS, BLOCK_K, S.shape[1])), PRECISION), 0)


@triton.jit
def segment_transition(
    key,
    value,
    decay,
    key_mask,
    parameter_0,
    past_state,
    segment_states,
    transitions,
    key_from_start,
    key_to_end,
    chunk_decays,
    inverses,
    length,
    segments,
    chunks_per_segment,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_V columns of N or of M, all of d_k, over the segment before each.

    Grid: (B * HEADS * (tiles of d_v + tiles of d_k), segments). What is stored under the keys is
    summed over parts of BLOCK_K rows.
    """
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    TILES: tl.constexpr = V_TILES + tl.cdiv(D_K, BLOCK_V)
    KEYS: tl.constexpr = KEY_HEADS * WIDTH
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, D_K, PRECISION)
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES
    segment = tl.program_id(1)
    h = head % HEADS
    of_state = tile < V_TILES
    columns_k = components(D_K)
    columns = tl.where(of_state, tile, tile - V_TILES) * BLOCK_V + tl.arange(0, BLOCK_V)

    # The segment before, which is full; before the first there is none.
    chunks = tl.where(segment > 0, chunks_per_segment, 0)
    first_chunk = segment * chunks_per_segment - chunks
    row = (head // HEADS).to(tl.int64) * length + first_chunk * CHUNK
    key += row * KEYS + h * KEY_HEADS // HEADS * WIDTH
    value += row * (HEADS * D_V) + h * D_V
    if decay is not None:
        decay += (row * HEADS + h) * DECAYS
    if key_mask is not None:
        key_mask += row
    head = head.to(tl.int64)
    chunk = head * tl.cdiv(length, CHUNK) + first_chunk
    inverses += chunk * (CHUNK * CHUNK)
    if DECAYS > 1:
        key_from_start += chunk * (CHUNK * D_K)
        key_to_end += chunk * (CHUNK * D_K)
        chunk_decays += chunk * D_K

    S = ((columns_k[:, None] == columns[None, :]) & (tile >= V_TILES)).to(tl.float32)
    if past_state is not None:
        at = columns_k[:, None] * D_V + columns[None, :]
        inside = (columns_k < D_K)[:, None] & (columns < D_V)[None, :] & of_state & (segment == 0)
        S += tl.load(past_state + head * (D_K * D_V) + at, mask=inside, other=0.0)

    live = tl.arange(0, CHUNK) < CHUNK
    for start in range(0, chunks * CHUNK, CHUNK):
        offset = tl.cast(start, tl.int64)
        keep = load_keep(key_mask + offset if key_mask is not None else None, live)
        k = chunk_keys(key_from_start, key, offset, keep, columns_k, parameter_0, KEYS, DECAYS, phi)
        place = value + offset * (HEADS * D_V)
        v = load_rows(place, live & of_state, columns, HEADS * D_V, D_V)
        T = load_square(inverses + offset * CHUNK, CHUNK)
        k_rest = k
        if DECAYS == 1:
            place = decay + offset * HEADS
            from_start, to_end, whole, _, _, _ = head_decays(place, keep, HEADS)
            stored = under_keys(k, S, BLOCK_K, PRECISION) * from_start[:, None]
            S *= whole
        elif DECAYS > 1:
            k_rest = load_chunk(key_to_end + offset * D_K, columns_k, CHUNK, D_K)
            place = chunk_decays + start // CHUNK * D_K + columns_k
            whole = tl.load(place, mask=columns_k < D_K, other=0.0)
            stored = under_keys(k, S, BLOCK_K, PRECISION)
            S *= whole[:, None]
        else:
            stored = under_keys(k, S, BLOCK_K, PRECISION)
        u = written(T, v, stored, k.dtype, PRECISION)
        if DECAYS == 1:
            u = faded(u, to_end, k.dtype)
        S += tl.dot(tl.trans(k_rest), u, input_precision=PRECISION)

    slot = head * segments + segment
    if of_state:
        place = segment_states + slot * (D_K * D_V + D_K)
        store_part(place, S, columns_k, columns, D_K, D_V)
    else:
        store_part(transitions + slot * (D_K * D_K), S, columns_k, columns, D_K, D_K)


@triton.jit
def transition_scan(
    segment_states,
    transitions,
    segments,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add M S_before to N in every slot, in place: the state before each segment.

    Grid: (B * HEADS * tiles of d_v). The states of a program's columns go through memory, d_k in
    parts of BLOCK_K.
    """
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    PARTS: tl.constexpr = tl.cdiv(D_K, BLOCK_K)
    SLOT: tl.constexpr = D_K * D_V + D_K
    head = (tl.program_id(0) // V_TILES).to(tl.int64)
    columns_v = tl.program_id(0) % V_TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.arange(0, BLOCK_K)
    for segment in range(1, segments):
        slot = head * segments + segment
        state, transition = segment_states + slot * SLOT, transitions + slot * (D_K * D_K)
        for row in range(PARTS):
            rows = row * BLOCK_K + part
            S, _ = load_state(state, None, rows, columns_v, D_K, D_V)
            for column in range(PARTS):
                columns_k = column * BLOCK_K + part
                M, _ = load_state(transition, None, rows, columns_k, D_K, D_K)
                past, _ = load_state(state - SLOT, None, columns_k, columns_v, D_K, D_V)
                S += tl.dot(M, past, input_precision=PRECISION)
            store_part(state, S, rows, columns_v, D_K, D_V)
        # Threads read what others write, in the next segment.
        tl.debug_barrier()
