"""The input that counts the tokens before a piece, and values computed from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.states import FIRST, LENGTH, UNSET
from linexport.graph.tensors import known_shape
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

    def keep_first(self, given: gs.Tensor) -> None:
        """Read an input as the first call of a sequence was given it.

        A later call counts on from it, and may be given it again, or what the last one returned.
        """
        past, present = (f"{name}{given.name}" for name in FIRST)
        readers = [(node, place) for node in given.outputs for place in _places(node, given)]
        sizes = known_shape(given)
        kept = gs.Variable(past, given.dtype, sizes or [1])
        self.graph.inputs.append(kept)
        held = kept
        if not sizes:
            held = self._node("Squeeze", f"{past}/number", [kept], dtype=given.dtype)
        unset = gs.Constant(f"{past}/unset", np.asarray(UNSET, given.dtype))
        first = self._node("Equal", f"{past}/is_first", [held, unset], dtype=np.bool_)
        found = self._node("Where", f"{past}/found", [first, given, held], dtype=given.dtype)
        for value in (held, first, found):
            value.shape = sizes
        after = gs.Variable(present, given.dtype, kept.shape)
        row = gs.Constant(f"{present}/shape", np.asarray([1], np.int64))
        op, inputs = ("Identity", [found]) if sizes else ("Reshape", [found, row])
        self.graph.nodes.append(gs.Node(op, present, inputs=inputs, outputs=[after]))
        self.graph.outputs.append(after)
        for node, place in readers:
            node.inputs[place] = found

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

    def count_all(self, node: gs.Node, place: int) -> None:
        """Let a node read the number of all tokens, where it reads that of this piece."""
        counted, stem = node.inputs[place], f"{node.name}/all"
        # Of the shape of what it is added to: a number is not one row.
        past = self._node("Squeeze", f"{stem}/past", [self.length])
        past = self._node("CastLike", f"{stem}/cast", [past, counted], dtype=counted.dtype)
        total = self._node("Add", stem, [counted, past], dtype=counted.dtype)
        total.shape = counted.shape
        node.inputs[place] = total

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


def _places(node: gs.Node, tensor: gs.Tensor) -> list[int]:
    return [place for place, given in enumerate(node.inputs) if given is tensor]
