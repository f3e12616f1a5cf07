"""States of causal linear attention before each segment of a sequence; for notation see ``linear``.

    S'  = exp(L_C) * S + (K * exp(L_C - L))^T V          z' = exp(L_C) * z + sum of K * exp(L_C - L)

``segment_state`` runs this alone from zero over each segment, and ``segment_scan`` turns the
results into the state before each segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import HeadFeatures, chunk_keys
from linexport.plugins.kernels.sources.tiles import (
    faded,
    first_column,
    head_decays,
    load_keep,
    load_rows,
    store_state,
)


@triton.jit
def segment_state(
    key,
    value,
    decay,
    key_mask,
    parameter_0,
    segment_states,
    segment_decays,
    key_to_end,
    chunk_decays,
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
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State and normaliser of each segment on its own, and the product of its decays.

    Grid: (B * HEADS * tiles of the state, segments). The state is (D_K, D_V), then D_K values of
    the normaliser.
    """
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    TILES: tl.constexpr = tl.cdiv(D_K, BLOCK_K) * V_TILES
    KEYS: tl.constexpr = KEY_HEADS * WIDTH
    phi: tl.constexpr = HeadFeatures(MAP, WIDTH, D_K, PRECISION)
    # A tile of the state, d_k by d_v, of one head; and which segment.
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES
    segment = tl.program_id(1)
    h = head % HEADS
    columns_k = tile // V_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    columns_v = tile % V_TILES * BLOCK_V + tl.arange(0, BLOCK_V)

    first = segment * chunks_per_segment * CHUNK
    row = (head // HEADS).to(tl.int64) * length + first
    key += row * KEYS + h * KEY_HEADS // HEADS * WIDTH
    value += row * (HEADS * D_V) + h * D_V
    if decay is not None:
        decay += (row * HEADS + h) * DECAYS
    if key_mask is not None:
        key_mask += row
    if DECAYS > 1:
        chunk = head.to(tl.int64) * tl.cdiv(length, CHUNK) + segment * chunks_per_segment
        key_to_end += chunk * (CHUNK * D_K)
        chunk_decays += chunk * D_K

    S = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    # The normaliser is the first column of a narrow state; see ``linear``.
    one = first_column(CHUNK, tl.float32)
    Z = tl.zeros((BLOCK_K, 16), tl.float32)
    if DECAYS > 1:
        product = tl.full((BLOCK_K,), 1.0, tl.float32)
    else:
        product = 1.0
    last = tl.minimum(length - first, chunks_per_segment * CHUNK)
    for start in range(0, last, CHUNK):
        offset = tl.cast(start, tl.int64)
        live = start + tl.arange(0, CHUNK) < last
        keep = load_keep(key_mask + offset if key_mask is not None else None, live)
        k = chunk_keys(key_to_end, key, offset, keep, columns_k, parameter_0, KEYS, DECAYS, phi)
        v = load_rows(value + offset * (HEADS * D_V), live, columns_v, HEADS * D_V, D_V)
        v, ones = v.to(k.dtype), one.to(k.dtype)
        # What the state held decays over the chunk, and what is added by what is left of it.
        if DECAYS == 1:
            _, to_end, whole, _, _, _ = head_decays(decay + offset * HEADS, keep, HEADS)
            v, ones = faded(v, to_end, k.dtype), faded(one, to_end, k.dtype)
            S *= whole
            Z *= whole
            product *= whole
        elif DECAYS > 1:
            place = chunk_decays + start // CHUNK * D_K + columns_k
            whole = tl.load(place, mask=columns_k < D_K, other=0.0)
            S *= whole[:, None]
            Z *= whole[:, None]
            product *= whole
        # The chunk's own keys and values; the narrow product first, see ``linear``.
        if NORMALIZE:
            Z += tl.dot(tl.trans(k), ones, input_precision=PRECISION)
        S += tl.dot(tl.trans(k), v, input_precision=PRECISION)

    # The scan multiplies states by the product of a segment's decays: it is written once, by the
    # first tile of each row of tiles.
    slot = head.to(tl.int64) * segments + segment
    segment_states += slot * (D_K * D_V + D_K)
    z = tl.sum(Z, 1)
    store_state(segment_states, segment_states + D_K * D_V, S, z, columns_k, columns_v, D_K, D_V)
    if DECAYS == 1:
        if tile == 0:
            tl.store(segment_decays + slot, product)
    elif DECAYS > 1:
        inside = (columns_k < D_K) & (tile % V_TILES == 0)
        tl.store(segment_decays + slot * D_K + columns_k, product, mask=inside)


@triton.jit
def segment_scan(
    segment_states,
    segment_decays,
    past_state,
    past_normalizer,
    present_state,
    present_normalizer,
    segments,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace what each segment adds by the state before it, in place; the last sum is the present.

    Grid: (B * HEADS * blocks of the state). DECAYS is how many decays a token of a head has: 0, 1
    or D_K.
    """
    STATE: tl.constexpr = D_K * D_V
    SLOT: tl.constexpr = STATE + D_K
    BLOCKS: tl.constexpr = tl.cdiv(SLOT, BLOCK)
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = at < SLOT
    of_state = at < STATE
    of_normalizer = inside & (at >= STATE)
    # The key channel, whose decay applies: rows of the state, then the normaliser.
    channel = tl.where(of_state, at // D_V, at - STATE)
    before = tl.zeros((BLOCK,), tl.float32)
    if past_state is not None:
        before += tl.load(past_state + head * STATE + at, mask=of_state, other=0.0)
    if past_normalizer is not None:
        place = past_normalizer + head * D_K + at - STATE
        before += tl.load(place, mask=of_normalizer, other=0.0)
    # An exclusive scan: a slot gives what its segment adds, and takes what came before it.
    for segment in range(0, segments):
        slot = head * segments + segment
        place = segment_states + slot * SLOT + at
        added = tl.load(place, mask=inside, other=0.0)
        tl.store(place, before, mask=inside)
        if DECAYS == 1:
            before *= tl.load(segment_decays + slot)
        elif DECAYS > 1:
            before *= tl.load(segment_decays + slot * D_K + channel, mask=inside, other=0.0)
        before += added
    if present_state is not None:
        tl.store(present_state + head * STATE + at, before, mask=of_state)
    if present_normalizer is not None:
        place = present_normalizer + head * D_K + at - STATE
        tl.store(place, before, mask=of_normalizer)
