"""Split off padding in front of the tokens from convolutions and from other padding.

Conv(x, pads = [n, 0])           becomes       Conv(Pad(x, n in front))
Pad(x, n in front, m channels)   becomes       Pad(Pad(x, m channels), n in front)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import index_of
from linexport.graph.monomials import Size
from linexport.graph.partial_eval import Values, stated_sizes
from linexport.match.emit.layout import written_size
from linexport.match.forms.token_sizes import TokenSizes

FILLINGS = {"Conv": 0.0, "AveragePool": 0.0, "MaxPool": -math.inf}
"""Numbers that windows of an operator see in front of the first token."""


@dataclass
class PadsApart:
    """Padding that was taken out of a node.

    Attributes:
        node: the node.
        made: its input, padded.
        pads: of the node, before.
    """

    node: gs.Node
    made: gs.Variable
    pads: list[int] = field(default_factory=list)

    def undo(self) -> None:
        """Give the node its padding back."""
        pad = self.made.inputs[0]
        self.node.inputs[0] = pad.inputs[0]
        self.node.attrs["pads"] = self.pads
        pad.inputs.clear()
        pad.outputs.clear()


def pads_apart(
    graph: gs.Graph, sizes: TokenSizes, known: Values, left: Callable[[gs.Node], bool]
) -> list[PadsApart]:
    """Write all padding in front of the tokens as nodes of their own; returns that of windows.

    Args:
        graph: changed in place.
        sizes: which symbol is the number of tokens.
        known: values of the graph.
        left: whether a node keeps its padding.
    """
    for node in [n for n in graph.nodes if n.op == "Pad"]:
        _split(graph, node, sizes, known)
    return [
        found
        for node in [n for n in graph.nodes if n.op in FILLINGS]
        if not left(node) and (found := _taken_out(graph, node, sizes)) is not None
    ]


def _taken_out(graph: gs.Graph, node: gs.Node, sizes: TokenSizes) -> PadsApart | None:
    """Take the padding along the tokens out of a window."""
    given, pads = node.inputs[0], list(node.attrs.get("pads", ()))
    axis, auto = sizes.axis(given), node.attrs.get("auto_pad", "NOTSET")
    whole = node.op != "AveragePool" or node.attrs.get("count_include_pad", 0)
    if axis is None or axis < 2 or not pads or auto not in ("NOTSET", b"NOTSET") or not whole:
        return None
    count = len(pads) // 2
    front, behind = pads[axis - 2], pads[axis - 2 + count]
    if front == 0 or given.dtype is None:
        return None
    rank = 2 + count
    amounts = np.zeros((2, rank), np.int64)
    amounts[:, axis] = front, behind
    made = _padded(graph, node, given, amounts, FILLINGS[node.op])
    made.shape = _longer(given, axis, front + behind)
    left = [0 if i in (axis - 2, axis - 2 + count) else n for i, n in enumerate(pads)]
    node.inputs[0], node.attrs["pads"] = made, left
    return PadsApart(node, made, pads)


def _split(graph: gs.Graph, node: gs.Node, sizes: TokenSizes, known: Values) -> None:
    """Pad other axes than that of the tokens before it."""
    given, amounts = node.inputs[0], known.numbers(node.inputs[1])
    axis = sizes.axis(given)
    named = len(node.inputs) > 3 and not node.inputs[3].is_empty()
    if axis is None or amounts is None or named or node.attrs.get("mode", "constant") != "constant":
        return
    pads = amounts.reshape(2, -1)
    others = pads.copy()
    others[:, axis] = 0
    if pads[0, axis] <= 0 or not others.any() or (pads < 0).any():
        return
    made = gs.Variable(f"{node.outputs[0].name}/others", given.dtype)
    stated = [
        size + Size(int(n))
        for size, n in zip(stated_sizes(given) or (), others.sum(0), strict=True)
    ]
    made.shape = [written_size(size) for size in stated]
    rest = node.inputs[2:]
    first = [given, gs.Constant(f"{made.name}/pads", others.ravel()), *rest]
    graph.nodes.insert(index_of(graph, node), gs.Node("Pad", made.name, {}, first, [made]))
    own = gs.Constant(f"{node.outputs[0].name}/pads", (pads - others).ravel())
    node.inputs = [made, own, *rest]


def _padded(
    graph: gs.Graph, node: gs.Node, given: gs.Tensor, amounts: np.ndarray, fill: float
) -> gs.Variable:
    """Return a value with rows in front and behind, made by a node before another one."""
    made = gs.Variable(f"{node.outputs[0].name}/padded", given.dtype)
    pads = gs.Constant(f"{made.name}/pads", amounts.ravel())
    filling = gs.Constant(f"{made.name}/fill", np.asarray(fill, given.dtype))
    pad = gs.Node("Pad", made.name, {}, [given, pads, filling], [made])
    graph.nodes.insert(index_of(graph, node), pad)
    return made


def _longer(given: gs.Tensor, axis: int, by: int) -> list[int | str]:
    """Return the sizes of a value with more rows along an axis."""
    sizes = stated_sizes(given) or []
    sizes[axis] += Size(by)
    return [written_size(size) for size in sizes]
