"""Packed tensors (B, T, C) with their tokens delayed, reversed, masked or scaled, as nodes.

delayed     x_{t-1}, zeros before the first token: a convolution with the taps 1, 0, whose state
is the last token of the piece before
reversed    x_{T-1-t}
masked      x_t where the mask is true, else 0
scaled      f_t x_t
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.plugins.ops import causal_conv
from linexport.recognise.nodes import Nodes

WHOLE = np.iinfo(np.int64)

FORGOTTEN = -1e4
"""The logarithm of a decay that leaves nothing."""


def delayed_tokens(nodes: Nodes, x: gs.Variable) -> gs.Variable:
    """Return x_{t-1}, and zeros before the first token."""
    dtype, (batch, length, channels) = np.dtype(x.dtype), x.shape
    across = {"perm": [0, 2, 1]}
    taps = np.tile(np.asarray([1, 0], dtype), (channels, 1, 1))
    weight = gs.Constant(nodes.name("taps"), taps)
    shape = [batch, channels, length]
    x = nodes.add("Transpose", [x], dtype, attrs=across, shape=shape)
    attributes = {"activation": "none"}
    x = nodes.add(causal_conv.OP.name, [x, weight], dtype, attrs=attributes, shape=shape)
    return nodes.add("Transpose", [x], dtype, attrs=across, shape=[batch, length, channels])


def delayed_logarithms(nodes: Nodes, x: gs.Variable) -> gs.Variable:
    """Return x_{t-1} of logarithms of decays, of which some may be -inf."""
    # The tap 0 makes NaN of -inf; exp of this bound is 0 in every dtype.
    dtype = np.dtype(x.dtype)
    least = gs.Constant(nodes.name("least"), np.asarray(FORGOTTEN, dtype))
    return delayed_tokens(nodes, nodes.add("Max", [x, least], dtype, shape=x.shape))


def reversed_tokens(nodes: Nodes, x: gs.Variable) -> gs.Variable:
    """Return the tokens in reverse order; an absent tensor stays absent."""
    if x.is_empty():
        return x
    # From the last token to beyond the first, in steps of -1.
    ends = (("starts", -1), ("ends", WHOLE.min), ("axes", 1), ("steps", -1))
    given = [gs.Constant(nodes.name(n), np.asarray([value], np.int64)) for n, value in ends]
    return nodes.add("Slice", [x, *given], np.dtype(x.dtype), shape=x.shape)


def masked_tokens(nodes: Nodes, x: gs.Variable, mask: gs.Variable) -> gs.Variable:
    """Return zeros where the mask, (B, T), is false."""
    dtype = np.dtype(x.dtype)
    last = gs.Constant(nodes.name("axes"), np.asarray([2], np.int64))
    kept = nodes.cast(mask, dtype)
    kept = nodes.add("Unsqueeze", [kept, last], dtype, shape=[*mask.shape, 1])
    return nodes.add("Mul", [x, kept], dtype, shape=x.shape)


def scaled_tokens(nodes: Nodes, x: gs.Variable, factor: gs.Variable, heads: int) -> gs.Variable:
    """Return x times a factor (B, T, heads) or (B, T, heads * width)."""
    dtype, shape = np.dtype(x.dtype), list(x.shape)
    if factor.shape[2] == shape[2]:
        return nodes.add("Mul", [x, factor], dtype, shape=shape)
    split = [*shape[:2], heads, shape[2] // heads]
    sizes = gs.Constant(nodes.name("shape"), np.asarray([0, 0, heads, -1], np.int64))
    packed = gs.Constant(nodes.name("shape"), np.asarray([0, 0, shape[2]], np.int64))
    last = gs.Constant(nodes.name("axes"), np.asarray([3], np.int64))
    factor = nodes.add("Unsqueeze", [factor, last], dtype, shape=[*factor.shape, 1])
    x = nodes.add("Reshape", [x, sizes], dtype, shape=split)
    x = nodes.add("Mul", [x, factor], dtype, shape=split)
    return nodes.add("Reshape", [x, packed], dtype, shape=shape)
