"""Exponential features with a running maximum, as ``plugins.ops.stabilized_exp`` says it.

    m_t = max(m_{t-1} + g_t, a_t)        a scan over tokens, of every feature on its own

A stretch of tokens takes a maximum m to max(m + G, M): G is the sum of its decays, and M what it
makes of no maximum. A sequence is cut into segments: ``segment_maximum`` gives G and M of each, and
``segment_features`` goes on from what those before its own make of the past. One segment needs that
kernel only, where it is causal. Slot g of segment g is of the segment before it, and slot 0 holds
the past: no block reads what another writes in the same launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.tiles import load_keep, load_rows

LOWEST = tl.constexpr(-1e30)


@triton.jit
def later(m, g, a, h):
    """M and G of two stretches, one after the other."""
    return tl.maximum(m + h, a), g + h


@triton.jit
def larger(a, b):
    """The maximum of two stretches without decays."""
    return tl.maximum(a, b)


@triton.jit
def running(a, g, DECAYS: tl.constexpr):
    """M and G from the first row up to each."""
    if DECAYS > 0:
        return tl.associative_scan((a, g), 0, later)
    else:
        return tl.associative_scan(a, 0, larger), g


@triton.jit
def last_of(x):
    """The last row."""
    rows = tl.arange(0, x.shape[0])
    return tl.sum(tl.where((rows == x.shape[0] - 1)[:, None], x, 0.0), 0)


@triton.jit
def load_exponents(
    key,
    decay,
    key_mask,
    live,
    columns,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """Exponents and decays of rows of keys: LOWEST and 0 past the last token."""
    keep = load_keep(key_mask, live)
    a = load_rows(key, keep, columns, HEADS * FEATURES, FEATURES)
    a = tl.where(keep[:, None] & (columns < FEATURES)[None, :], a, LOWEST)
    g = tl.zeros(a.shape, tl.float32)
    if DECAYS == 1:
        rows = tl.arange(0, live.shape[0])
        g += tl.load(decay + rows * HEADS, mask=keep, other=0.0)[:, None]
    elif DECAYS > 1:
        g += load_rows(decay, keep, columns, HEADS * FEATURES, FEATURES)
    return a, g


@triton.jit
def segment_maximum(
    key,
    decay,
    key_mask,
    past_key_max,
    segment_maxima,
    segment_decays,
    length,
    segments,
    chunks_per_segment,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    DECAYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """M and G of each segment. Grid: (B * HEADS, segments).

    Where it is causal they are of the segment before each, and those of the first are the past.
    """
    head = tl.program_id(0)
    segment = tl.program_id(1)
    h = head % HEADS
    columns = tl.arange(0, BLOCK)
    inside = columns < FEATURES
    of = segment - 1 if CAUSAL else segment
    first = of * chunks_per_segment * CHUNK
    last = tl.minimum(length - first, chunks_per_segment * CHUNK)
    if CAUSAL:
        last = tl.where(segment > 0, last, 0)
    row = (head // HEADS).to(tl.int64) * length + first
    key += (row * HEADS + h) * FEATURES
    if decay is not None:
        decay += (row * HEADS + h) * DECAYS
    if key_mask is not None:
        key_mask += row
    head = head.to(tl.int64)
    m = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if past_key_max is not None:
        here = inside & (segment == 0)
        m = tl.load(past_key_max + head * FEATURES + columns, mask=here, other=LOWEST)
    for start in range(0, last, CHUNK):
        offset = tl.cast(start, tl.int64)
        a, g = load_exponents(
            key + offset * (HEADS * FEATURES),
            decay + offset * (HEADS * DECAYS) if decay is not None else None,
            key_mask + offset if key_mask is not None else None,
            start + tl.arange(0, CHUNK) < last,
            columns,
            HEADS,
            FEATURES,
            DECAYS,
        )
        if DECAYS > 0:
            a, g = running(a, g, DECAYS)
            m = tl.maximum(m + last_of(g), last_of(a))
            total += last_of(g)
        else:
            m = tl.maximum(m, tl.max(a, 0))
    place = (head * segments + segment) * FEATURES + columns
    tl.store(segment_maxima + place, m, mask=inside)
    if DECAYS > 0:
        tl.store(segment_decays + place, total, mask=inside)


@triton.jit
def segment_features(
    query,
    key,
    decay,
    key_mask,
    past_key_max,
    segment_maxima,
    segment_decays,
    query_features,
    key_features,
    present_decay,
    present_key_max,
    length,
    segments,
    chunks_per_segment,
    HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    DECAYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Features and decays of each segment; the last one writes the maximum behind it.

    Grid: (B * HEADS, segments). A program serves all query heads of its maximum. Reads
    ``segment_maxima`` or the past, not both.
    """
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    head = tl.program_id(0)
    segment = tl.program_id(1)
    h = head % HEADS
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    inside = columns < FEATURES
    first = segment * chunks_per_segment * CHUNK
    last = tl.minimum(length - first, chunks_per_segment * CHUNK)
    row = (head // HEADS).to(tl.int64) * length + first
    query += row * (QUERY_HEADS * FEATURES)
    key += (row * HEADS + h) * FEATURES
    query_features += row * (OUT * FEATURES)
    key_features += (row * HEADS + h) * FEATURES
    present_decay += (row * HEADS + h) * FEATURES
    if decay is not None:
        decay += (row * HEADS + h) * DECAYS
    if key_mask is not None:
        key_mask += row
    head = head.to(tl.int64)
    # The maximum that the segment goes on from; where it is not causal, that of all tokens.
    m = tl.full((BLOCK,), LOWEST, tl.float32)
    if segment_maxima is not None:
        for slot in range(0, segment + 1 if CAUSAL else segments):
            place = (head * segments + slot) * FEATURES + columns
            if DECAYS > 0:
                m += tl.load(segment_decays + place, mask=inside, other=0.0)
            m = tl.maximum(m, tl.load(segment_maxima + place, mask=inside, other=LOWEST))
    elif past_key_max is not None:
        m = tl.load(past_key_max + head * FEATURES + columns, mask=inside, other=LOWEST)

    for start in range(0, last, CHUNK):
        offset = tl.cast(start, tl.int64)
        keys = key + offset * (HEADS * FEATURES)
        decays = decay + offset * (HEADS * DECAYS) if decay is not None else None
        mask = key_mask + offset if key_mask is not None else None
        live = start + rows < last
        a, g = load_exponents(keys, decays, mask, live, columns, HEADS, FEATURES, DECAYS)
        after = tl.zeros((CHUNK, BLOCK), tl.float32) + m[None, :]
        lost = tl.zeros((CHUNK, BLOCK), tl.float32)
        if CAUSAL:
            # m_{t-1} is a scan of the rows one token earlier, behind the maximum before the chunk.
            earlier, decayed = load_exponents(
                keys - HEADS * FEATURES,
                decays - HEADS * DECAYS if decay is not None else None,
                mask - 1 if key_mask is not None else None,
                (rows > 0) & (start + rows <= last),
                columns,
                HEADS,
                FEATURES,
                DECAYS,
            )
            earlier = tl.where((rows == 0)[:, None], m[None, :], earlier)
            before, _ = running(earlier, decayed, DECAYS)
            after = tl.maximum(before + g, a)
            lost = (g + before) - after
            m = last_of(after)
        at = rows[:, None] * (HEADS * FEATURES) + columns[None, :]
        written = live[:, None] & inside[None, :]
        place = offset * (HEADS * FEATURES) + at
        tl.store(key_features + place, tl.exp(a - after), mask=written)
        tl.store(present_decay + place, lost, mask=written)
        for member in tl.static_range(GROUP):
            # Query heads that share this maximum, one after the other.
            o_head = h * GROUP + member
            place = query + offset * (QUERY_HEADS * FEATURES)
            place += o_head * QUERY_HEADS // OUT * FEATURES
            b = load_rows(place, live, columns, QUERY_HEADS * FEATURES, FEATURES) + after
            b = tl.where(inside[None, :], b, float("-inf"))
            features = tl.exp(b - tl.max(b, 1)[:, None])
            at = rows[:, None] * (OUT * FEATURES) + columns[None, :]
            place = query_features + offset * (OUT * FEATURES) + o_head * FEATURES
            tl.store(place + at, features, mask=written)

    if segment == segments - 1:
        # Threads write what others read, where past and present are one memory.
        tl.debug_barrier()
        tl.store(present_key_max + head * FEATURES + columns, m, mask=inside)
