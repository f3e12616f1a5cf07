"""Functions common to the kernels: rows of a head, decays, scaled products, states.

Decays of one chunk, from the logarithms g_1 ... g_C. With L_t the sum of g up to t:

    from_start_t = exp(L_t)    to_end_t = exp(L_C - L_t)    pairs_ts = exp(L_t - L_s), s <= t

A difference of sums loses the digits of a small term next to a large one. Sums are therefore kept
in two parts: multiples of 2^-10, whose sums and differences are exact up to 2^13, and what is left.
A g below -80, whose exponential (2e-35) is below the rounding of its addend in float32, is left
out of the sums and counted instead: factors are zero where the counts differ. -inf, a hard reset,
is then exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

RESET, GRID = tl.constexpr(-80.0), tl.constexpr(2.0**-10)


@triton.jit
def components(WIDTH: tl.constexpr):
    """Columns of the components of a head, as many more as tensor cores ask for."""
    return tl.arange(0, max(triton.next_power_of_2(WIDTH), 16))


@triton.jit
def first_column(ROWS: tl.constexpr, dtype: tl.constexpr):
    """Ones in the first of as few columns as tensor cores take, zeros in the others."""
    return (tl.zeros((ROWS, 16), tl.int32) == tl.arange(0, 16)[None, :]).to(dtype)


@triton.jit
def load_rows(base, live, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows from ``base`` on, at a stride of ``STRIDE``; zero where not live or past WIDTH columns.

    ``columns`` begin at a multiple of their number.
    """
    rows = tl.arange(0, live.shape[0])
    inside = live[:, None]
    if tl.cdiv(WIDTH, columns.shape[0]) * columns.shape[0] != WIDTH:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * STRIDE + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, x, live, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The reverse of ``load_rows``, in the type of the memory."""
    at = tl.arange(0, live.shape[0])[:, None] * STRIDE + columns[None, :]
    inside = live[:, None] & (columns < WIDTH)[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_chunk(base, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of a matrix (ROWS, WIDTH) without gaps, zero past WIDTH: of ``channels``."""
    at = tl.arange(0, ROWS)[:, None] * WIDTH + columns[None, :]
    if tl.cdiv(WIDTH, columns.shape[0]) * columns.shape[0] != WIDTH:
        return tl.load(base + at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(base + at)


@triton.jit
def load_square(base, SIZE: tl.constexpr):
    """A matrix (SIZE, SIZE) without gaps: the scores or the inverse of one chunk."""
    rows = tl.arange(0, SIZE)
    return tl.load(base + rows[:, None] * SIZE + rows[None, :])


@triton.jit
def load_keep(key_mask, live):
    """Which of the live rows hold a token that is not padded."""
    if key_mask is not None:
        rows = tl.arange(0, live.shape[0])
        live = live & (tl.load(key_mask + rows, mask=live, other=0) != 0)
    return live


@triton.jit
def without_bytes(keep):
    """Rows to keep, by a reduction: behind it Triton does not see that the mask is of bytes.

    It lays out the operands of a product for the narrowest type loaded on the way to them. Keys
    under a mask have another layout than a state, and queries that are multiplied by both are then
    loaded without asynchronous copies.
    """
    return tl.max(keep[:, None].to(tl.int32), 1) != 0


@triton.jit
def in_two_parts(g):
    """Each g as a multiple of GRID and what is left, between 0 and GRID."""
    coarse = tl.floor(g / GRID) * GRID
    return coarse, g - coarse


@triton.jit
def head_decays(base, keep, STRIDE: tl.constexpr):
    """One decay a token: from_start (C,), to_end (C,), the product of all, and sums for ``pairs``.

    The sums: of multiples of GRID, of what is left, and how many resets; each (C,).
    """
    rows = tl.arange(0, keep.shape[0])
    g = tl.load(base + rows * STRIDE, mask=keep, other=0.0).to(tl.float32)
    # Decays below RESET leave the sums and are counted; equal counts mean none lies between.
    reset = g < RESET
    counts = reset.to(tl.int32)
    coarse, fine = in_two_parts(tl.where(reset, 0.0, g))
    sums, rests, resets = tl.cumsum(coarse, 0), tl.cumsum(fine, 0), tl.cumsum(counts, 0)
    total, rest, count = tl.sum(coarse, 0), tl.sum(fine, 0), tl.sum(counts, 0)
    from_start = tl.where(resets == 0, tl.exp(sums + rests), 0.0)
    to_end = tl.where(resets == count, tl.exp((total - sums) + (rest - rests)), 0.0)
    whole = tl.where(count == 0, tl.exp(total + rest), 0.0)
    return from_start, to_end, whole, sums, rests, resets


@triton.jit
def pairs(sums, rests, resets):
    """exp(L_t - L_s) for s <= t, 0 otherwise, (C, C), of what ``head_decays`` gave.

    Made where it is used: with a state in registers, a tile of pairs does not fit.
    """
    rows = tl.arange(0, sums.shape[0])
    related = (rows[:, None] >= rows[None, :]) & (resets[:, None] == resets[None, :])
    between = (sums[:, None] - sums[None, :]) + (rests[:, None] - rests[None, :])
    return tl.where(related, tl.exp(between), 0.0)


@triton.jit
def faded(x, to_end, dtype: tl.constexpr):
    """Rows of x as they are after the chunk, in ``dtype``; the same where ``to_end`` is None."""
    if to_end is not None:
        x = x.to(tl.float32) * to_end[:, None]
    return x.to(dtype)


@triton.jit
def channel_logarithms(base, keep, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """g (C, K) of a decay for each token and key channel; below RESET it is taken for RESET."""
    g = load_rows(base, keep, columns, STRIDE, WIDTH).to(tl.float32)
    return tl.maximum(g, RESET)


@triton.jit
def decayed_scores(rows, keys, g, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Sum over channels of rows_t * keys_s * exp(L_t - L_s) for s <= t, 0 otherwise; in float32.

    The two exponentials by themselves would overflow. But two neighbouring blocks of 2^level tokens
    meet at a token b, and for s <= b < t both exp(L_t - L_b) and exp(L_b - L_s) are at most 1: all
    pairs of a level are one product. A row is in the left block of its two, or in the right one: it
    has one exponential a level, of a sum of g. That is a product with zeros and ones, and not a
    difference of sums: in terms of one sign the small ones keep their digits. C = 2^LEVELS.
    """
    at = tl.arange(0, rows.shape[0])
    scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION)
    scores = tl.where(at[:, None] == at[None, :], scores, 0.0)
    for level in range(LEVELS):
        block = at >> level
        # The first token of the right block: b is the one before it.
        middle = ((block | 1) << level)[:, None]
        t, u = at[:, None], at[None, :]
        right = (middle <= u) & (u <= t)
        left = (t < u) & (u < middle)
        between = tl.dot((left | right).to(tl.float32), g, input_precision=PRECISION)
        factor = tl.exp(between)
        later = (rows.to(tl.float32) * factor).to(rows.dtype)
        earlier = (keys.to(tl.float32) * factor).to(keys.dtype)
        product = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
        meet = (block[:, None] == block[None, :] + 1) & (block[:, None] & 1 == 1)
        scores += tl.where(meet, product, 0.0)
    return scores


@triton.jit
def times_state(rows, state, PRECISION: tl.constexpr):
    """Return rows (C, d_k) times the float32 state (d_k, d_v), as (C, d_v) in float32.

    The state is rounded to bfloat16 where rows have that type. For float16 rows the product is in
    TensorFloat-32, which has the same digits: sums over a long sequence leave float16's range.
    """
    if rows.dtype == tl.float16:
        return tl.dot(rows.to(tl.float32), state, input_precision="tf32")
    else:
        return tl.dot(rows, state.to(rows.dtype), input_precision=PRECISION)


@triton.jit
def from_state(rows, state, from_start, PRECISION: tl.constexpr):
    """(X * exp(L)) S: what rows X (C, d_k) of a chunk read of the state before it.

    exp(L) is ``from_start``, one decay a token, which scales rows of the product as well as rows of
    X. It is None where there are no decays, or X has them already.
    """
    found = times_state(rows, state, PRECISION)
    if from_start is not None:
        found *= from_start[:, None]
    return found


@triton.jit
def after_chunk(state, whole, keys, values, to_end, PRECISION: tl.constexpr):
    """exp(L_C) * S + (K * exp(L_C - L))^T U: a state after a chunk that writes rows U.

    exp(L_C) is ``whole``, None without decays; exp(L_C - L) is ``to_end``, None where K has it.
    """
    kept = faded(values, to_end, keys.dtype)
    if whole is not None:
        state *= whole
    state += tl.dot(tl.trans(keys), kept, input_precision=PRECISION)
    return state


@triton.jit
def times_rows(scores, rows, PRECISION: tl.constexpr):
    """scores @ rows, the scores in float32 and treated as a state is."""
    if rows.dtype == tl.float16:
        return tl.dot(scores, rows.to(tl.float32), input_precision="tf32")
    else:
        return tl.dot(scores.to(rows.dtype), rows, input_precision=PRECISION)


@triton.jit
def load_state(
    past_state,
    past_normalizer,
    columns_k,
    columns_v,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
):
    """A tile of state and normaliser in float32, zero where there is none."""
    S = tl.zeros((columns_k.shape[0], columns_v.shape[0]), tl.float32)
    z = tl.zeros((columns_k.shape[0],), tl.float32)
    rows = columns_k < D_K
    if past_state is not None:
        at = columns_k[:, None] * D_V + columns_v[None, :]
        inside = rows[:, None] & (columns_v < D_V)[None, :]
        S += tl.load(past_state + at, mask=inside, other=0.0)
    if past_normalizer is not None:
        z += tl.load(past_normalizer + columns_k, mask=rows, other=0.0)
    return S, z


@triton.jit
def store_state(
    present_state,
    present_normalizer,
    S,
    z,
    columns_k,
    columns_v,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
):
    """The reverse; the tile with the first columns of the state writes the normaliser."""
    # Threads write what others read, where past and present are one memory.
    tl.debug_barrier()
    store_part(present_state, S, columns_k, columns_v, D_K, D_V)
    if present_normalizer is not None:
        first = tl.min(columns_v, 0) == 0
        tl.store(present_normalizer + columns_k, z, mask=(columns_k < D_K) & first)


@triton.jit
def store_part(state, S, columns_k, columns_v, D_K: tl.constexpr, D_V: tl.constexpr):
    """These rows and columns of a state."""
    at = columns_k[:, None] * D_V + columns_v[None, :]
    inside = (columns_k < D_K)[:, None] & (columns_v < D_V)[None, :]
    tl.store(state + at, S, mask=inside)
