"""Packed tensors (B, T, C) with their tokens delayed, reversed, masked or scaled, as nodes.

delayed     x_{t-k}, zeros before the first token: by 1 a convolution with the taps 1, 0, whose
state is the last token of the piece before; else Pad and Slice
reversed    x_{T-1-t}
masked      x_t where the mask is true, else 0
scaled      f_t x_t
over a window    x_{t-k+1} + ... + x_t, or their product
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.tensors import known_shape, static_size
from linexport.match.emit.layout import Nodes

INT64 = np.iinfo(np.int64)

FORGOTTEN = -1e4
"""The logarithm of a decay that leaves nothing."""


@dataclass(frozen=True)
class Undelayed:
    """Keys and values that a token writes to a state after it has read it.

    Attributes:
        key, value: (B, T, heads * width).
        decay: logarithms, (B, T, heads) or as keys; absent where nothing fades.
    """

    key: gs.Tensor
    value: gs.Tensor
    decay: gs.Tensor

    def after_last(self, nodes: Nodes, state: gs.Tensor, sizes: Sequence[int]) -> gs.Tensor | None:
        """Return the state (B, heads, keys, values) that the last token has been written to.

        None where heads share keys.
        """
        heads, keys, values = sizes
        wide = [static_size(self.key, 2), static_size(self.value, 2)]
        if wide != [heads * keys, heads * values]:
            return None
        columns, rows = [0, heads, -1, 1], [0, heads, 1, -1]
        kind = np.dtype(state.dtype)
        last = [nodes.cast(_last(nodes, x), kind) for x in (self.key, self.value)]
        key, value = (nodes.op.Reshape(x, to) for x, to in zip(last, (columns, rows), strict=True))
        new = nodes.op.Mul(key, value, shape=state.shape)
        kept = state
        if not self.decay.is_empty():
            decay = nodes.cast(_last(nodes, self.decay), kind)
            faded = nodes.op.Reshape(nodes.op.Exp(decay), columns)
            kept = nodes.op.Mul(state, faded, shape=state.shape)
        return nodes.op.Add(kept, new, shape=state.shape)


def delayed_tokens(nodes: Nodes, x: gs.Tensor, by: int = 1) -> gs.Tensor:
    """Return x_{t-k}, and zeros before the first token."""
    dtype, (batch, length, channels) = np.dtype(x.dtype), known_shape(x)
    if by > 1:
        late = _cut(nodes, _padded(nodes, x, by, 0.0), 0, -by)
        late.shape = [batch, length, channels]
        return late
    # The taps of the token before and of the token itself.
    taps = np.tile(np.asarray([1, 0], dtype), (static_size(x, 2), 1, 1))
    x = nodes.op.Transpose(x, perm=[0, 2, 1])
    x = nodes.op.CausalConvWithState(x, taps, dtype=dtype, shape=x.shape, activation="none")
    return nodes.op.Transpose(x, perm=[0, 2, 1])


def delayed_logarithms(nodes: Nodes, x: gs.Tensor, by: int = 1) -> gs.Tensor:
    """Return x_{t-k} of logarithms of decays, of which some may be -inf."""
    # The tap 0 makes NaN of -inf; exp of this bound is 0 in every dtype.
    return delayed_tokens(nodes, nodes.op.Max(x, FORGOTTEN), by)


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
    batch, length, channels = known_shape(x)
    shape = [batch, f"{front}+{length}", channels]
    return nodes.op.Pad(x, [0, front, 0, 0, 0, 0], fill, shape=shape)


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


def _last(nodes: Nodes, x: gs.Tensor) -> gs.Variable:
    """Return the last token, (B, C)."""
    batch, _, channels = known_shape(x)
    return nodes.op.Gather(x, np.asarray(-1, np.int64), axis=1, shape=[batch, channels])


def reversed_tokens(nodes: Nodes, x: gs.Tensor) -> gs.Tensor:
    """Return the tokens in reverse order; an absent tensor is returned as it is."""
    if x.is_empty():
        return x
    # From the last token to beyond the first, in steps of -1.
    return nodes.op.Slice(x, [-1], [INT64.min], [1], [-1], shape=x.shape)


def masked_tokens(nodes: Nodes, x: gs.Tensor, mask: gs.Tensor) -> gs.Tensor:
    """Return zeros where the mask, (B, T), is false."""
    kept = nodes.op.Unsqueeze(nodes.cast(mask, np.dtype(x.dtype)), [2])
    return nodes.op.Mul(x, kept, shape=x.shape)


def scaled_tokens(nodes: Nodes, x: gs.Tensor, factor: gs.Tensor, heads: int) -> gs.Tensor:
    """Return x times a factor (B, T, heads) or (B, T, heads * width)."""
    *_, width = known_shape(x)
    if known_shape(factor)[2] == width:
        return nodes.op.Mul(x, factor, shape=x.shape)
    factor = nodes.op.Unsqueeze(factor, [3])
    by_head = nodes.op.Reshape(x, [0, 0, heads, -1])
    scaled = nodes.op.Mul(by_head, factor, shape=by_head.shape)
    return nodes.op.Reshape(scaled, [0, 0, static_size(x, 2)])
