"""DiagonalStateSpace in standard operators: products of matrices, chunk by chunk.

The sequence is cut into chunks of C = min(T, 32) tokens, with zeros in front of the first one, in
which R tokens are left. With z = a + 2 pi i w, place t of a chunk, and h the state before it

    y_t = sum_{s <= t} K_{t-s} u_s  +  Re sum_n (c_n + i d_n) e^{z_n (t + 1)} h_n
    h'  = e^{z C} h + sum_s e^{z (C - 1 - s)} u_s           e^{z R} of the first one

Three products of all chunks at once, each with a matrix of the head that depends on the weights
alone, so that runtimes compute it when they load the file. Only h goes from chunk to chunk. What
float32 makes of e^{z C} would grow with their number: h and e^{z l} are in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.diagonal_state_space.definition import StateSpaceSizes, view
from linexport.plugins.ops.op import Node

CHUNK = 32
"""Tokens of a chunk at most: 64 are as fast, and their matrices take twice the memory."""


class _Tables(NamedTuple):
    """Tensors of the weights.

    Attributes:
        within: (H, 32, 32), K_{t-s} for s <= t.
        out: (H, M, 32), what place t has of the state before its chunk.
        into: (H, 32, M), what the state behind a chunk has of place s.
        steps: real and, with angles, imaginary part of e^{z l}, (33, H, 1, N) in float64.
    """

    within: str
    out: str
    into: str
    steps: tuple[str, ...]


class _Cut(NamedTuple):
    """Sizes, each a tensor of one integer.

    Attributes:
        batch, length: B and T.
        chunks, size: their number, and the tokens of one.
        padding: zeros in front.
        first: tokens in the first chunk.
    """

    batch: str
    length: str
    chunks: str
    size: str
    padding: str
    first: str


def portable(node: Node) -> tuple[Body, list[str]]:
    """Write a body for one node."""
    sizes, b = view(node), Body()
    x, rate, cosine, sine, angle, past = node.inputs
    tables, cut = _tables(b, sizes, rate, cosine, sine, angle), _cut(b, x)
    heads, width = sizes.heads, sizes.d_v
    rows = b.Concat(b.const([heads]), b.Mul(cut.batch, b.const([width])), axis=0)
    u = _chunks(b, sizes, x, cut)
    start = _start(b, sizes, past, rows)
    into = b.Slice(tables.into, b.Neg(cut.size), b.const([CHUNK]), b.const([1]))
    added = b.Reshape(b.MatMul(u, into), b.Concat(rows, cut.chunks, b.const([sizes.d_k]), axis=0))
    tokens = b.Expand(cut.size, b.Sub(cut.chunks, b.const([1])))
    tokens = b.Concat(cut.first, tokens, axis=0)
    last, before = _scan(b, sizes, start, tokens, added, tables)

    all_of_one = b.Concat(cut.size, cut.size, axis=0)
    within = b.Slice(tables.within, b.const([0, 0]), all_of_one, b.const([1, 2]))
    whole = b.Mul(cut.chunks, cut.size)
    inside = b.Reshape(b.MatMul(u, within), b.Concat(rows, whole, axis=0))
    inside = b.Slice(inside, cut.padding, whole, b.const([2]))
    y = b.Add(inside, _carried(b, sizes, start, before, tables.out, cut, rows))
    by_head = b.Concat(b.const([heads]), cut.batch, b.const([width]), cut.length, axis=0)
    y = b.Transpose(b.Reshape(y, by_head, allowzero=1), perm=[1, 3, 0, 2])
    own = b.Concat(b.const([heads]), cut.batch, b.const([width, sizes.d_k]), axis=0)
    state = b.Transpose(b.Reshape(last, own, allowzero=1), perm=[1, 0, 3, 2])
    return b, [b.CastLike(b.Reshape(y, b.Shape(x), allowzero=1), x), state]


def _cut(b: Body, x: str) -> _Cut:
    length, one = b.Shape(x, start=1, end=2), b.const([1])
    # At least one token and one chunk: a Scan of none has no outputs to speak of.
    size = b.Max(b.Min(length, b.const([CHUNK])), one)
    count = b.Max(b.Div(b.Sub(b.Add(length, size), one), size), one)
    padding = b.Sub(b.Mul(count, size), length)
    return _Cut(b.Shape(x, start=0, end=1), length, count, size, padding, b.Sub(size, padding))


def _chunks(b: Body, sizes: StateSpaceSizes, x: str, cut: _Cut) -> str:
    """Return the tokens of each chunk, (H, B * d_v * count, C)."""
    pads = b.Concat(b.const([0]), cut.padding, b.const([0, 0, 0, 0]), axis=0)
    padded = b.Pad(b.Cast(x, to=TensorProto.FLOAT), pads)
    packed = b.const([sizes.heads, sizes.d_v])
    shape = b.Concat(cut.batch, cut.chunks, cut.size, packed, axis=0)
    chunks = b.Transpose(b.Reshape(padded, shape, allowzero=1), perm=[3, 0, 4, 1, 2])
    return str(b.Reshape(chunks, b.Concat(b.const([sizes.heads, -1]), cut.size, axis=0)))


def _start(b: Body, sizes: StateSpaceSizes, past: str, rows: str) -> str:
    """Return the state before the first token, (H, B * d_v, M)."""
    shape = b.Concat(rows, b.const([sizes.d_k]), axis=0)
    if not past:
        return str(b.Expand(b.const(0.0), shape))
    return str(b.Reshape(b.Transpose(past, perm=[1, 0, 3, 2]), shape, allowzero=1))


def _carried(
    b: Body,
    sizes: StateSpaceSizes,
    start: str,
    before: str,
    out: str,
    cut: _Cut,
    rows: str,
) -> str:
    """Return what tokens have of the states before their chunks, (H, B * d_v, T)."""
    zero, along = b.const([0]), b.const([2])
    first = b.MatMul(start, b.Slice(out, zero, cut.first, along))
    states = b.Slice(before, b.const([1]), cut.chunks, along)
    states = b.Reshape(states, b.const([sizes.heads, -1, sizes.d_k]))
    others = b.MatMul(states, b.Slice(out, zero, cut.size, along))
    shape = b.Concat(rows, b.Sub(cut.length, cut.first), axis=0)
    return str(b.Concat(first, b.Reshape(others, shape, allowzero=1), axis=2))


def _tables(
    b: Body, sizes: StateSpaceSizes, rate: str, cosine: str, sine: str, angle: str
) -> _Tables:
    distance, t = np.arange(CHUNK + 1), np.arange(CHUNK)
    last, distances, none = b.const([-1]), b.const(distance, np.float64), b.const(0.0, np.float64)
    a, c, d, w = (b.Unsqueeze(x, last) if x else "" for x in (rate, cosine, sine, angle))
    # A rate of -inf keeps nothing, and e^{a 0} is 1 nevertheless.
    exponent = b.Mul(b.CastLike(a, none), distances)
    real = b.Exp(b.Where(b.const(distance > 0), exponent, none))
    if sizes.turns:
        turns = b.Mul(w, distances)
        radians = b.Mul(b.Sub(turns, b.Round(turns)), b.const(2 * math.pi, np.float64))
        steps = [b.Mul(real, x) for x in (b.Cos(radians), b.Sin(radians))]
        re, im = parts = [b.Cast(x, to=TensorProto.FLOAT) for x in steps]
        imaginary = b.Neg(b.Add(b.Mul(c, im), b.Mul(d, re)))
        out = [b.Sub(b.Mul(c, re), b.Mul(d, im)), imaginary]
    else:
        steps, parts = [real], [b.Cast(real, to=TensorProto.FLOAT)]
        out = [b.Mul(c, parts[0])]
    # (H, C + 1), of which the last number stands for all that is not s <= t.
    kernel = b.ReduceSum(out[0], b.const([1]), keepdims=0)
    kernel = b.Where(b.const(distance < CHUNK), kernel, b.const(0.0))
    places = np.where(t >= t[:, None], t - t[:, None], CHUNK)
    given, taken = (x[0] if len(x) == 1 else b.Concat(*x, axis=1) for x in (parts, out))
    back = b.Gather(given, b.const(t[::-1].copy()), axis=2)
    return _Tables(
        b.Gather(kernel, b.const(places), axis=1),
        b.Gather(taken, b.const(t + 1), axis=2),
        b.Transpose(back, perm=[0, 2, 1]),
        tuple(b.Unsqueeze(b.Transpose(x, perm=[2, 0, 1]), b.const([2])) for x in steps),
    )


def _scan(
    b: Body, sizes: StateSpaceSizes, start: str, tokens: str, added: str, tables: _Tables
) -> tuple[str, str]:
    """Return the last state, and those before each chunk, (H, B * d_v, count, M).

    Args:
        b: the body to append to.
        sizes: of the node.
        start: the state before the first chunk, (H, B * d_v, M).
        tokens: of each chunk.
        added: what every chunk adds to the state, (H, B * d_v, count, M).
        tables: those of the node.
    """
    step = Body(b)
    h, number, more = (step.fresh(name) for name in ("h", "tokens", "added"))
    factors = [step.Gather(x, number, axis=0) for x in tables.steps]
    if sizes.turns:
        re, im = step.Split(h, outputs=2, axis=2, num_outputs=2)
        of_re, of_im = factors
        turned = [
            step.Sub(step.Mul(of_re, re), step.Mul(of_im, im)),
            step.Add(step.Mul(of_im, re), step.Mul(of_re, im)),
        ]
        kept = step.Concat(*turned, axis=2)
    else:
        kept = step.Mul(factors[0], h)
    after, before = step.Add(kept, step.CastLike(more, h)), step.CastLike(h, more)
    last, states = b.Scan(
        b.Cast(start, to=TensorProto.DOUBLE),
        tokens,
        added,
        outputs=2,
        body=step.subgraph("chunk", [h, number, more], [after, before]),
        num_scan_inputs=2,
        scan_input_axes=[0, 2],
        scan_output_axes=[2],
    )
    return b.Cast(last, to=TensorProto.FLOAT), states
