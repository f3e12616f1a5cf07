"""Numbers that a graph stores and uses along its tokens, whatever is made of them.

Streaming is tried past twice each of them, so that what is read of nodes may be wrong: none is
looked up in what nodes were found to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.operators import SIZES_ONLY, WINDOWS
from linexport.graph.states import LENGTH
from linexport.token_flow.interpreter import is_external

LARGEST = 1 << 12
"""Larger numbers are not taken for places of tokens: ends of an axis, sizes of tables."""

ALONG = {"Slice": (1, 2), "Pad": (1,), "Split": (1,), "Trilu": (1,), "Gather": (1,)}
"""Operators, with the inputs whose numbers may be places of tokens."""

POSITIONS: tuple[str, ...] = (
    "Add",
    "Clip",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
)
POSITIONS += ("Max", "Min", "Mod", "Range", "Sub", "Where")
"""Operators whose numbers are of tokens where they meet positions, which depend on no values."""

SLIDING = WINDOWS - {"ConvTranspose"}


def along_tokens(graph: gs.Graph, tokens: str) -> tuple[int, ...]:
    """Return the numbers, each once, in order; ``tokens`` is the size of the axis of tokens."""
    positions = {LENGTH[0]}
    found = set()
    for node in graph.nodes:
        given = [t for t in node.inputs if not t.is_empty()]
        known = all(isinstance(t, gs.Constant) or t.name in positions for t in given)
        if known or node.op in SIZES_ONLY:
            positions |= {t.name for t in node.outputs}
        found |= {abs(n) for n in _numbers(node, tokens, known)}
    return tuple(sorted(n for n in found if 1 < n <= LARGEST))


def _numbers(node: gs.Node, tokens: str, of_positions: bool) -> Iterator[int]:
    if node.op in SLIDING:
        yield from _window(node, tokens)
        return
    places = ALONG.get(node.op, ())
    if node.op in POSITIONS and of_positions:
        places = tuple(range(len(node.inputs)))
    if not any(_has(t, tokens) for t in (*node.inputs, *node.outputs)):
        return
    for place in places:
        if place < len(node.inputs):
            numbers = _stored(node.inputs[place])
            own = _own_axis(node, tokens, len(numbers))
            yield from (int(n) for n in numbers[own] if float(n).is_integer())


def _window(node: gs.Node, tokens: str) -> Iterator[int]:
    """Yield how far a window reaches along the tokens."""
    shape = node.inputs[0].shape or ()
    kernel = node.attrs.get("kernel_shape")
    if kernel is None:
        kernel = (node.inputs[1].shape or ())[2:]
    gaps = node.attrs.get("dilations") or [1] * len(kernel)
    for size, width, gap in zip(shape[2:], kernel, gaps, strict=False):
        if isinstance(width, int) and tokens in str(size):
            yield gap * (width - 1)


def _has(tensor: gs.Tensor, tokens: str) -> bool:
    return any(tokens in str(size) for size in tensor.shape or ())


def _stored(tensor: gs.Tensor) -> np.ndarray:
    """Return the numbers of a small constant."""
    if not isinstance(tensor, gs.Constant) or np.prod(tensor.shape, dtype=np.int64) > LARGEST:
        return np.zeros(0)
    if is_external(tensor) or tensor.values.dtype.kind not in "iuf":
        return np.zeros(0)
    flat = np.ravel(tensor.values)
    return flat[np.isfinite(flat)]


def _own_axis(node: gs.Node, tokens: str, count: int) -> list[int]:
    """Return which of some numbers are of the axis of tokens; all where that is not known."""
    every, shape = list(range(count)), node.inputs[0].shape if node.inputs else None
    if node.op not in ("Gather", "Pad", "Slice", "Split") or shape is None:
        return every
    if node.op in ("Gather", "Split"):
        axis = node.attrs.get("axis", 0) % max(len(shape), 1)
        return every if tokens in str(shape[axis]) else []
    axes = _stored(node.inputs[3]) if len(node.inputs) > 3 else np.zeros(0)
    places = [int(n) for n in axes] or list(range(len(shape)))
    return [n for n in every if tokens in str(shape[places[n % len(places)] % len(shape)])]
