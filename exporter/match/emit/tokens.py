"""Packed tensors (B, T, C) with their tokens delayed, reversed, masked or scaled, as nodes.

delayed     x_{t-k}, zeros before the first token: by 1 a convolution with the taps 1, 0, whose
state is the last token of the piece before; else Pad and Slice
reversed    x_{T-1-t}
masked      x_t where the mask is true, else 0
scaled      f_t x_t
over a window    x_{t-k+1} + ... + x_t, or their product
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.tensors import known_shape, static_size
from linexport.match.emit.layout import Nodes
from linexport.plugins.ops import causal_conv

INT64 = np.iinfo(np.int64)

FORGOTTEN = -1e4
"""The logarithm of a decay that leaves nothing."""


def delayed_tokens(nodes: Nodes, x: gs.Tensor, by: int = 1) -> gs.Tensor:
    """Return x_{t-k}, and zeros before the first token."""
    dtype, (batch, length, channels) = np.dtype(x.dtype), known_shape(x)
    if by > 1:
        late = _cut(nodes, _padded(nodes, x, by, 0.0), 0, -by)
        late.shape = [batch, length, channels]
        return late
    across = {"perm": [0, 2, 1]}
    taps = np.tile(np.asarray([1, 0], dtype), (static_size(x, 2), 1, 1))
    weight = gs.Constant(nodes.name("taps"), taps)
    shape = [batch, channels, length]
    x = nodes.add("Transpose", [x], dtype, attrs=across, shape=shape)
    attributes = {"activation": "none"}
    x = nodes.add(causal_conv.OP.name, [x, weight], dtype, attrs=attributes, shape=shape)
    return nodes.add("Transpose", [x], dtype, attrs=across, shape=[batch, length, channels])


def delayed_logarithms(nodes: Nodes, x: gs.Tensor, by: int = 1) -> gs.Tensor:
    """Return x_{t-k} of logarithms of decays, of which some may be -inf."""
    # The tap 0 makes NaN of -inf; exp of this bound is 0 in every dtype.
    dtype = np.dtype(x.dtype)
    least = gs.Constant(nodes.name("least"), np.asarray(FORGOTTEN, dtype))
    return delayed_tokens(nodes, nodes.add("Max", [x, least], dtype, shape=x.shape), by)


def over_window(nodes: Nodes, x: gs.Tensor, count: int, op: str) -> gs.Tensor:
    """Return sums (op Add) or products (op Mul) of the last tokens, so many of them.

    Windows are doubled, and made longer by one token: both sums are of parts that do not overlap.
    """
    shape = list(known_shape(x))
    if count == 1:
        return x
    single = _padded(nodes, x, count - 1, float(op == "Mul"))
    found, size = single, 1
    for bit in f"{count:b}"[1:]:
        earlier, later = _cut(nodes, found, 0, -size), _cut(nodes, found, size)
        found, size = _both(nodes, op, earlier, later), 2 * size
        if bit == "1":
            earlier, later = _cut(nodes, found, 0, -1), _cut(nodes, single, size)
            found, size = _both(nodes, op, earlier, later), size + 1
    found.shape = shape
    return found


def _padded(nodes: Nodes, x: gs.Tensor, front: int, fill: float) -> gs.Variable:
    """Return rows of a number in front of the tokens."""
    dtype, (batch, length, channels) = np.dtype(x.dtype), known_shape(x)
    pads = gs.Constant(nodes.name("pads"), np.asarray([0, front, 0, 0, 0, 0], np.int64))
    filling = gs.Constant(nodes.name("fill"), np.asarray(fill, dtype))
    shape = [batch, f"{front}+{length}", channels]
    return nodes.add("Pad", [x, pads, filling], dtype, shape=shape)


def _both(nodes: Nodes, op: str, x: gs.Tensor, y: gs.Tensor) -> gs.Variable:
    made = nodes.add(op, [x, y], np.dtype(x.dtype))
    made.shape = None
    return made


def _cut(nodes: Nodes, x: gs.Tensor, start: int, end: int = INT64.max) -> gs.Variable:
    """Return the tokens from one place to another, which may be counted from the last."""
    ends = (("starts", start), ("ends", end), ("axes", 1))
    given = [gs.Constant(nodes.name(n), np.asarray([value], np.int64)) for n, value in ends]
    made = nodes.add("Slice", [x, *given], np.dtype(x.dtype))
    made.shape = None
    return made


def reversed_tokens(nodes: Nodes, x: gs.Tensor) -> gs.Tensor:
    """Return the tokens in reverse order; an absent tensor stays absent."""
    if x.is_empty():
        return x
    # From the last token to beyond the first, in steps of -1.
    ends = (("starts", -1), ("ends", INT64.min), ("axes", 1), ("steps", -1))
    given = [gs.Constant(nodes.name(n), np.asarray([value], np.int64)) for n, value in ends]
    return nodes.add("Slice", [x, *given], np.dtype(x.dtype), shape=x.shape)


def masked_tokens(nodes: Nodes, x: gs.Tensor, mask: gs.Tensor) -> gs.Tensor:
    """Return zeros where the mask, (B, T), is false."""
    dtype = np.dtype(x.dtype)
    last = gs.Constant(nodes.name("axes"), np.asarray([2], np.int64))
    kept = nodes.cast(mask, dtype)
    kept = nodes.add("Unsqueeze", [kept, last], dtype, shape=[*known_shape(mask), 1])
    return nodes.add("Mul", [x, kept], dtype, shape=x.shape)


def scaled_tokens(nodes: Nodes, x: gs.Tensor, factor: gs.Tensor, heads: int) -> gs.Tensor:
    """Return x times a factor (B, T, heads) or (B, T, heads * width)."""
    dtype, shape = np.dtype(x.dtype), list(known_shape(x))
    if known_shape(factor)[2] == shape[2]:
        return nodes.add("Mul", [x, factor], dtype, shape=shape)
    split = [*shape[:2], heads, static_size(x, 2) // heads]
    sizes = gs.Constant(nodes.name("shape"), np.asarray([0, 0, heads, -1], np.int64))
    packed = gs.Constant(nodes.name("shape"), np.asarray([0, 0, shape[2]], np.int64))
    last = gs.Constant(nodes.name("axes"), np.asarray([3], np.int64))
    factor = nodes.add("Unsqueeze", [factor, last], dtype, shape=[*known_shape(factor), 1])
    x = nodes.add("Reshape", [x, sizes], dtype, shape=split)
    x = nodes.add("Mul", [x, factor], dtype, shape=split)
    return nodes.add("Reshape", [x, packed], dtype, shape=shape)
