"""Nodes of a graph, looked up by what they make and read, and new ones in the place of some."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.registry import known_shapes
from linexport.plugins.ops.shapes import Dim
from linexport.targets.cpu_fusion.groups import readers_of
from linexport.targets.cpu_fusion.nodes import attributes

MAX_CONSTANT_ELEMENTS = 8
"""Elements of a constant that is looked up."""

KnownShape = tuple[Dim, ...]


def terms(size: Dim) -> list[str]:
    """Return the summands of a size, whose order may differ."""
    return sorted(str(size).split(" + "))


class UnmatchedError(Exception):
    """Nodes that are something else than what is looked for; the message says why."""


class Lookup:
    """A model's graph, which is not changed meanwhile."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._nodes = graph.node
        self._shapes = known_shapes(model)
        self._readers = readers_of(graph)
        self._producer = {n: i for i, node in enumerate(graph.node) for n in node.output if n}
        self._constants = {
            t.name: numpy_helper.to_array(t)
            for t in graph.initializer
            if t.data_location != TensorProto.EXTERNAL and prod(t.dims) <= MAX_CONSTANT_ELEMENTS
        }
        typed = (*graph.input, *graph.value_info, *graph.output)
        self._types = {value.name: value.type.tensor_type.elem_type for value in typed}

    def producer(self, name: str, op: str, domain: str = "") -> onnx.NodeProto | None:
        """Return the node that makes a value, None where it is of another operator."""
        node = self._nodes[self._producer[name]] if name in self._producer else None
        return node if node is not None and (node.domain, node.op_type) == (domain, op) else None

    def expect(self, name: str, op: str, **expected: object) -> onnx.NodeProto:
        """Return the node that makes a value.

        Raises:
            UnmatchedError: it is of another operator, or lacks one of these attributes.
        """
        node = self.producer(name, op)
        own = {} if node is None else attributes(node)
        if node is None or any(own.get(key) != value for key, value in expected.items()):
            raise UnmatchedError(f"{name} is not made by {op} {expected or ''}")
        return node

    def only_reader(self, name: str, op: str) -> onnx.NodeProto | None:
        """Return the node that alone reads a value, None where it is of another operator."""
        readers = self._readers.get(name, [])
        node = self._nodes[readers[0]] if len(readers) == 1 and readers[0] >= 0 else None
        return node if node is not None and (node.domain, node.op_type) == ("", op) else None

    def expect_reader(self, name: str, op: str) -> onnx.NodeProto:
        """Return the node that alone reads a value.

        Raises:
            UnmatchedError: it is of another operator, or the value is read elsewhere.
        """
        node = self.only_reader(name, op)
        if node is None:
            raise UnmatchedError(f"{name} is not read by one {op} alone")
        return node

    def has_one_reader(self, name: str) -> bool:
        """Return whether one node reads a value, outputs of the graph aside."""
        return len([r for r in self._readers.get(name, ()) if r >= 0]) == 1

    def shape(self, name: str, rank: int) -> KnownShape:
        """Return the shape of a float32 value.

        Raises:
            UnmatchedError: it is unknown, or the value is of another type or number of axes.
        """
        shape = self._shapes.get(name, ())
        if len(shape) != rank or None in shape or self._types.get(name) != TensorProto.FLOAT:
            raise UnmatchedError(f"{name} is not float32 of {rank} known axes")
        return shape

    def stated(self, name: str) -> KnownShape:
        """Return the shape of a value of any type, () where the file states none."""
        return self._shapes.get(name, ())

    def type(self, name: str) -> int | None:
        """Return the type of a value's elements, None where the file states none."""
        return self._types.get(name)

    def has_shape(self, name: str, shape: KnownShape) -> bool:
        """Return whether a value is float32 of this shape."""
        return self._shapes.get(name) == shape and self._types.get(name) == TensorProto.FLOAT

    def integers(self, name: str) -> list[int] | None:
        """Return a constant of few integers, None where the value is none."""
        found = self._constants.get(name)
        if found is None or found.dtype != np.int64:
            return None
        return [int(number) for number in found.reshape(-1)]

    def number(self, name: str) -> float | None:
        """Return a float32 constant of one element, None where the value is none."""
        found = self._constants.get(name)
        fits = found is not None and found.dtype == np.float32 and found.size == 1
        return float(found.item()) if found is not None and fits else None


class NewNodes:
    """Nodes that are added to a graph, each value once, with the shapes of what they make.

    Attributes:
        nodes: in order.
        values: what they make, by name.
        initializers: sizes and axes that they read, by name.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, onnx.ValueInfoProto] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}

    def add(
        self, op: str, inputs: Sequence[str], output: str, shape: KnownShape, **settings: Any
    ) -> str:
        """Add a node of one output, unless it is there; return the output."""
        if output not in self.values:
            self.nodes.append(helper.make_node(op, inputs, [output], output, **settings))
            self.know(output, shape)
        return output

    def know(self, name: str, shape: KnownShape) -> None:
        """Add what is known of a float32 value."""
        self.values[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of an initializer of these values."""
        name = f"cached_attention/{list(values)}"
        self.initializers[name] = numpy_helper.from_array(np.array(values, np.int64), name)
        return name
