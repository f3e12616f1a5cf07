"""The input that counts the tokens before a piece, and values computed from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.states import LENGTH
from linexport.match.emit.layout import element_type
from linexport.match.search.position_tables import Counted


def token_source(graph: gs.Graph, length: str) -> tuple[gs.Tensor, int] | None:
    """Return an input that has the token axis, and the place of that axis."""
    for given in graph.inputs:
        if given.shape and length in given.shape:
            return given, list(given.shape).index(length)
    return None


class PastLength:
    """Writes ``past_length``, ``present_length`` and what is offset by it.

    Args:
        graph: changed in place.
        source: an input that has the token axis.
        axis: the place of that axis.
    """

    def __init__(self, graph: gs.Graph, source: gs.Tensor, axis: int) -> None:
        self.graph = graph
        past, present = LENGTH
        self.length = gs.Variable(past, np.int64, [1])
        graph.inputs.append(self.length)
        attributes = {"start": axis, "end": axis + 1}
        self.count = self._node("Shape", f"{present}/count", [source], attributes)
        after = gs.Variable(present, np.int64, [1])
        inputs = [self.length, self.count]
        graph.nodes.append(gs.Node("Add", present, inputs=inputs, outputs=[after]))
        graph.outputs.append(after)

    def offset(self, node: gs.Node) -> None:
        """Add the past to the positions of a Range."""
        positions = node.outputs[0]
        counted = gs.Variable(f"{positions.name}/counted", positions.dtype, positions.shape)
        node.outputs[0] = counted
        inputs = [self.length, counted]
        past = self._node("CastLike", f"{node.name}/past", inputs, dtype=positions.dtype)
        self.graph.nodes.append(
            gs.Node("Add", f"{node.name}/offset", inputs=[counted, past], outputs=[positions])
        )

    def look_up(self, node: gs.Node, axis: int) -> None:
        """Gather the rows of a table at the positions of this piece, instead of slicing it."""
        table, (output,) = node.inputs[0], node.outputs
        node.outputs.clear()
        inputs = [table, self._positions(node.name)]
        self.graph.nodes.append(gs.Node("Gather", node.name, {"axis": axis}, inputs, [output]))

    def count_on(self, counted: Counted) -> None:
        """Compute a sum over positions from the past, instead of from those of this piece."""
        value, axis, stem = counted.value, counted.axis, f"{counted.value.name}/counted"
        value.inputs[0].outputs = [
            gs.Variable(f"{stem}/before") if t is value else t for t in value.inputs[0].outputs
        ]
        positions, kind = self._positions(stem), counted.table.dtype
        last = gs.Constant(f"{stem}/last", np.asarray(counted.table.shape[axis] - 1, np.int64))
        within = self._node("Min", f"{stem}/within", [positions, last])
        table = gs.Constant(f"{stem}/table", np.ascontiguousarray(counted.table))
        found = self._node("Gather", f"{stem}/found", [table, within], {"axis": axis}, kind)
        if counted.slope.any():
            beyond = self._node("Sub", f"{stem}/beyond", [positions, within])
            beyond = self._node("Cast", f"{stem}/cast", [beyond], {"to": element_type(kind)}, kind)
            sizes = [-1 if i == axis else 1 for i in range(counted.table.ndim)]
            shape = gs.Constant(f"{stem}/shape", np.asarray(sizes, np.int64))
            beyond = self._node("Reshape", f"{stem}/along", [beyond, shape], dtype=kind)
            slope = gs.Constant(f"{stem}/slope", counted.slope.astype(kind))
            line = self._node("Mul", f"{stem}/line", [beyond, slope], dtype=kind)
            found = self._node("Add", f"{stem}/sum", [found, line], dtype=kind)
        found.inputs[0].outputs = [value]

    def _positions(self, stem: str) -> gs.Variable:
        """Return the positions of the tokens of this piece."""
        zero, one = (gs.Constant(f"{stem}/{n}", np.asarray(n, np.int64)) for n in (0, 1))
        count = self._node("Squeeze", f"{stem}/count", [self.count])
        counted = self._node("Range", f"{stem}/range", [zero, count, one])
        return self._node("Add", f"{stem}/positions", [counted, self.length])

    def _node(
        self,
        op: str,
        name: str,
        inputs: Sequence[gs.Tensor],
        attributes: dict[str, int] | None = None,
        dtype: object = np.int64,
    ) -> gs.Variable:
        output = gs.Variable(name, dtype)
        self.graph.nodes.append(gs.Node(op, name, attributes or {}, inputs, [output]))
        return output
