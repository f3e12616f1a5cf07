"""Values of expressions of a token: ``plugins.kernels.expressions``, encoded as numbers.

A program is a constant: what a kernel is compiled to is the loads and the arithmetic themselves.
Rows are tokens (C, 1) and columns components of a head (1, D); a value has both axes, one of them,
or none. Everything is computed in float32. Past ``WIDTH`` columns a value means nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.expressions import KINDS

LOAD, NUMBER, SUM, CONVOLUTION = (tl.constexpr(kind) for kind in range(4))
NEG, EXP, LOG, SIGMOID, SOFTPLUS, SQRT, RECIPROCAL, RELU, ABS = (
    tl.constexpr(kind) for kind in range(4, 13)
)
ADD, SUB, MUL, DIV, MAX, MIN = (tl.constexpr(kind) for kind in range(13, len(KINDS)))


@triton.jit
def value(
    PROGRAM: tl.constexpr,
    AT: tl.constexpr,
    tensors,
    batch,
    times,
    live,
    length,
    head,
    columns,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Value of the expression at place AT of a program, where ``times`` are ``live``.

    EARLY: whether a convolution may see times before 0, which are in its past.
    """
    KIND: tl.constexpr = PROGRAM[AT]
    A: tl.constexpr = PROGRAM[AT + 1]
    if KIND == NUMBER:
        return A
    elif KIND == LOAD:
        at = tl.zeros((1, 1), tl.int64) + (head * PROGRAM[AT + 4] + PROGRAM[AT + 3])
        inside = at >= 0
        if PROGRAM[AT + 2] > 0:
            at += (batch * length + times) * PROGRAM[AT + 2]
            inside = live
        if PROGRAM[AT + 5] > 0:
            at += columns * PROGRAM[AT + 5]
            inside = inside & (columns < WIDTH)
        return tl.load(tensors[A] + at, mask=inside, other=0.0).to(tl.float32)
    elif KIND == CONVOLUTION:
        channels = PROGRAM[AT + 9] + head * PROGRAM[AT + 10] + columns * PROGRAM[AT + 11]
        inside = columns < WIDTH
        SIZE: tl.constexpr = PROGRAM[AT + 6]
        y = tl.zeros((1, 1), tl.float32)
        if PROGRAM[AT + 3] >= 0:
            y += tl.load(tensors[PROGRAM[AT + 3]] + channels, mask=inside, other=0.0).to(tl.float32)
        # Tap j sees the input k - 1 - j steps back, in the past where that is before t = 0.
        for j in tl.static_range(SIZE):
            w = tl.load(tensors[PROGRAM[AT + 2]] + channels * SIZE + j, mask=inside, other=0.0)
            x = seen(
                *(PROGRAM, AT, tensors, batch, times + (j + 1 - SIZE), length, head, columns),
                *(WIDTH, EARLY),
            )
            y += x * w.to(tl.float32)
        if PROGRAM[AT + 7]:
            y = y / (1.0 + tl.exp(-y))
        return y
    elif KIND == SUM:
        OWN: tl.constexpr = PROGRAM[AT + 2]
        row = tl.arange(0, triton.next_power_of_2(OWN))[None, :]
        x = value(PROGRAM, A, tensors, batch, times, live, length, head, row, OWN, EARLY)
        return tl.sum(tl.where(live & (row < OWN), x, 0.0), 1, keep_dims=True) * PROGRAM[AT + 3]
    else:
        x = value(PROGRAM, A, tensors, batch, times, live, length, head, columns, WIDTH, EARLY)
        if KIND >= ADD:
            B: tl.constexpr = PROGRAM[AT + 2]
            y = value(
                *(PROGRAM, B, tensors, batch, times, live, length, head, columns, WIDTH, EARLY)
            )
            return of_two(KIND, x, y)
        else:
            return of_one(KIND, x)


@triton.jit
def of_one(KIND: tl.constexpr, x):
    """A function of one number."""
    if KIND == NEG:
        return -x
    elif KIND == EXP:
        return tl.exp(x)
    elif KIND == LOG:
        return tl.log(x)
    elif KIND == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    elif KIND == SOFTPLUS:
        # log(1 + e) = log(u) e / (u - 1) with u = 1 + e rounded: the roundings cancel.
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    elif KIND == SQRT:
        return tl.sqrt(x)
    elif KIND == RECIPROCAL:
        return 1.0 / x
    elif KIND == RELU:
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == ABS)
        return tl.abs(x)


@triton.jit
def of_two(KIND: tl.constexpr, x, y):
    """A function of two numbers."""
    if KIND == ADD:
        return x + y
    elif KIND == SUB:
        return x - y
    elif KIND == MUL:
        return x * y
    elif KIND == DIV:
        return x / y
    elif KIND == MAX:
        return tl.maximum(x, y)
    else:
        tl.static_assert(KIND == MIN)
        return tl.minimum(x, y)


@triton.jit
def seen(
    PROGRAM: tl.constexpr,
    AT: tl.constexpr,
    tensors,
    batch,
    times,
    length,
    head,
    columns,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Input of the convolution at place AT: the past's where times are negative."""
    A: tl.constexpr = PROGRAM[AT + 1]
    given = times < length
    if EARLY:
        given = given & (times >= 0)
    x = value(PROGRAM, A, tensors, batch, times, given, length, head, columns, WIDTH, EARLY)
    if EARLY:
        x = tl.where(given, x, 0.0)
        if PROGRAM[AT + 4] >= 0:
            KEPT: tl.constexpr = PROGRAM[AT + 6] - 1
            channels = PROGRAM[AT + 9] + head * PROGRAM[AT + 10] + columns * PROGRAM[AT + 11]
            place = (batch * PROGRAM[AT + 8] + channels) * KEPT + times + KEPT
            inside = (times < 0) & (columns < WIDTH)
            x += tl.load(tensors[PROGRAM[AT + 4]] + place, mask=inside, other=0.0)
    return x


@triton.jit
def store_states(
    PROGRAM: tl.constexpr,
    CONVOLUTIONS: tl.constexpr,
    tensors,
    states,
    batch,
    length,
    head,
    columns,
    WIDTH: tl.constexpr,
    first,
):
    """Present states of the convolutions at these places, for columns (D,) of a head, if ``first``.

    The last k - 1 inputs; of a short sequence some of them are still the past's.
    """
    row = columns[None, :]
    for n in tl.static_range(len(CONVOLUTIONS)):
        AT: tl.constexpr = CONVOLUTIONS[n]
        KEPT: tl.constexpr = PROGRAM[AT + 6] - 1
        if KEPT > 0:
            rows = tl.arange(0, triton.next_power_of_2(KEPT))[:, None]
            live = rows < KEPT
            x = seen(
                *(PROGRAM, AT, tensors, batch, length - KEPT + rows, length, head, row),
                *(WIDTH, True),
            )
            channels = PROGRAM[AT + 9] + head * PROGRAM[AT + 10] + row * PROGRAM[AT + 11]
            place = (batch * PROGRAM[AT + 8] + channels) * KEPT + rows
            inside = live & (row < WIDTH) & first
            tl.store(states[PROGRAM[AT + 5]] + place, x, mask=inside)


@triton.jit
def of_token(
    PROGRAM: tl.constexpr,
    AT: tl.constexpr,
    tensors,
    batch,
    t,
    length,
    head,
    columns,
    WIDTH: tl.constexpr,
):
    """Value of the expression at place AT at one time, for each of the columns (D,)."""
    times = t + tl.arange(0, 1)[:, None]
    x = value(
        *(PROGRAM, AT, tensors, batch, times, times < length, length, head, columns[None, :]),
        *(WIDTH, True),
    )
    return tl.sum(tl.zeros((1, columns.shape[0]), tl.float32) + x, 0)
