"""Lookups in quantised tables by standard operators, for runtimes without a kernel of their own.

    com.microsoft.GatherBlockQuantized(q, i, s, z)  ->  (unpacked q[i] - unpacked z[i]) * s[i]

A byte of 4-bit values holds two, the first in its low half. Values, scales and zero points are
looked up first, so that nothing of the table's size is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OP = "GatherBlockQuantized"
DEFAULTS = {"bits": 4, "block_size": 128, "gather_axis": 0, "quantize_axis": 1}
"""Attributes of a node that has none of its own, as ONNX Runtime declares them."""


def expand_lookups(model: onnx.ModelProto) -> None:
    """Replace every lookup of a quantised table, in place.

    Tables are (V, D) along rows, in blocks that fill a row; other lookups stay.
    """
    graph = model.graph
    tables = {t.name: t for t in graph.initializer if t.data_type == TensorProto.UINT8}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        found = _lookup(node, tables) if node.op_type == OP else None
        nodes += [node] if found is None else found.nodes()
    del graph.node[:]
    graph.node.extend(nodes)


@dataclass(frozen=True)
class _Lookup:
    """A lookup: the node, and the form of its table.

    Attributes:
        node: the lookup.
        bits: of a value.
        block: values that share a scale and a zero point.
        blocks: of a row.
    """

    node: onnx.NodeProto
    bits: int
    block: int
    blocks: int

    def nodes(self) -> list[onnx.NodeProto]:
        values, index, scales, *zeros = self.node.input
        return [
            *self._unpacked(values, index, "values", self.blocks * self.block),
            *(self._unpacked(zeros[0], index, "zeros", self.blocks) if zeros else ()),
            helper.make_node("Gather", [scales, index], [self._name("scales")], axis=0),
            *self._scaled("zeros" if zeros else None),
        ]

    def _name(self, part: str) -> str:
        return f"{self.node.output[0]}/{part}"

    def _constant(self, part: str, value: np.ndarray) -> onnx.NodeProto:
        tensor = numpy_helper.from_array(value)
        return helper.make_node("Constant", [], [self._name(part)], value=tensor)

    def _unpacked(self, table: str, index: str, part: str, count: int) -> Iterator[onnx.NodeProto]:
        """Values of the rows looked up, (..., count) float32."""
        rows, name = self._name(f"{part}/rows"), self._name(part)
        yield helper.make_node("Gather", [table, index], [rows], axis=0)
        if self.bits == 4:
            low, high = self._name(f"{part}/low"), self._name(f"{part}/high")
            yield self._constant(f"{part}/half", np.array(15, np.uint8))
            yield self._constant(f"{part}/four", np.array(4, np.uint8))
            yield helper.make_node("BitwiseAnd", [rows, self._name(f"{part}/half")], [low])
            yield helper.make_node(
                "BitShift", [rows, self._name(f"{part}/four")], [high], direction="RIGHT"
            )
            yield from self._side_by_side(low, high, part, count)
            rows = self._name(f"{part}/bytes")
        yield helper.make_node("Cast", [rows], [name], to=TensorProto.FLOAT)

    def _side_by_side(self, low: str, high: str, part: str, count: int) -> Iterator[onnx.NodeProto]:
        """Put the two values of each byte after each other; a last half may be left over."""
        last, pairs = self._name(f"{part}/last"), []
        yield self._constant(f"{part}/last", np.array([-1]))
        for half in (low, high):
            pairs.append(f"{half}/column")
            yield helper.make_node("Unsqueeze", [half, last], [pairs[-1]])
        both, flat = self._name(f"{part}/both"), self._name(f"{part}/flat")
        yield helper.make_node("Concat", pairs, [both], axis=-1)
        yield self._constant(f"{part}/shape", np.array([0, 0, -1]))
        yield helper.make_node("Reshape", [both, self._name(f"{part}/shape")], [flat])
        yield self._constant(f"{part}/start", np.array([0]))
        yield self._constant(f"{part}/end", np.array([count]))
        ends = [self._name(f"{part}/{end}") for end in ("start", "end", "last")]
        yield helper.make_node("Slice", [flat, *ends], [self._name(f"{part}/bytes")])

    def _scaled(self, zeros: str | None) -> Iterator[onnx.NodeProto]:
        """(values - zeros) * scales, block by block."""
        column = self._name("column")
        yield self._constant("blocks", np.array([0, 0, self.blocks, self.block]))
        yield self._constant("column", np.array([-1]))
        yield self._constant("row", np.array([0, 0, -1]))
        grouped, lowered, scaled = (self._name(p) for p in ("grouped", "lowered", "scaled"))
        yield helper.make_node("Reshape", [self._name("values"), self._name("blocks")], [grouped])
        if zeros is None:
            middle = np.array(2 ** (self.bits - 1), np.float32)
            yield self._constant("middle", middle)
            yield helper.make_node("Sub", [grouped, self._name("middle")], [lowered])
        else:
            yield helper.make_node("Unsqueeze", [self._name(zeros), column], [f"{column}/zeros"])
            yield helper.make_node("Sub", [grouped, f"{column}/zeros"], [lowered])
        yield helper.make_node("Unsqueeze", [self._name("scales"), column], [f"{column}/scales"])
        yield helper.make_node("Mul", [lowered, f"{column}/scales"], [scaled])
        yield helper.make_node("Reshape", [scaled, self._name("row")], self.node.output)


def _lookup(node: onnx.NodeProto, tables: Mapping[str, onnx.TensorProto]) -> _Lookup | None:
    """The lookup of a node; None where its table has another form."""
    form = DEFAULTS | {a.name: helper.get_attribute_value(a) for a in node.attribute}
    table, bits, block = tables.get(node.input[0]), form["bits"], form["block_size"]
    along_rows = (form["gather_axis"], form["quantize_axis"]) == (0, 1)
    if table is None or len(table.dims) != 2 or not along_rows:
        return None
    if bits not in (4, 8) or block < 1:
        return None
    width = table.dims[1] * 8 // bits
    return None if width % block else _Lookup(node, bits, block, width // block)
