"""A graph with the steps of a loop side by side: which values are computed alike, from which token.

y_t = f(y_{t-1}, x[:, t])        the stamp of y_t is t: no later token is in it
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.trace.loops.capture import DOMAIN, LONGEST_CHUNK

COMPARED = 256
"""Bytes of constants up to which equal ones are one: each step pads by numbers of its own."""


class Token(NamedTuple):
    """One element of a tensor along an axis whose length varies, or one chunk of elements."""

    data: str
    number: int
    """Place of the element, or of the chunk."""
    axis: int
    width: int = 0
    """Elements of a chunk along an axis that is kept; 0 where the axis is removed."""


class Unrolled:
    """Values of a graph: which are the same, and the tokens in them.

    Attributes:
        producer: nodes by the values they compute.
        constants: initializers by name.
        types: of all values that have one.
        stamps: number of the last token that is in a value.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.producer = {o: n for n in graph.node for o in n.output}
        self.constants = {i.name: i for i in graph.initializer}
        self.types = {v.name: v for v in [*graph.value_info, *graph.input, *graph.output]}
        self.stamps: dict[str, int] = {}
        self._numbers: dict[object, str] = {}
        self._same: dict[str, str] = {}
        for name in self.constants:
            key = self._constant_key(name)
            self._same[name] = name if key is None else self._numbers.setdefault(key, name)
        for node in graph.node:
            self._number(node)

    def one(self, name: str) -> str:
        """Return one name for all values that are computed in the same way, or equal constants."""
        return self._same.get(name, name)

    def number(self, name: str) -> np.ndarray | None:
        """Return a constant, behind the casts and reshapes that exporters put after it."""
        found = self.constants.get(name)
        if found is not None:
            return numpy_helper.to_array(found) if self._small(name) else None
        node = self.producer.get(name)
        if node is None or node.op_type not in ("Cast", "Reshape"):
            return None
        value = self.number(node.input[0])
        if value is None or node.op_type == "Cast":
            kind = 0 if value is None else node.attribute[0].i
            return None if value is None else value.astype(helper.tensor_dtype_to_np_dtype(kind))
        shape = self.number(node.input[1])
        return None if shape is None else value.reshape(shape)

    def token(self, node: onnx.NodeProto) -> Token | None:
        """Return the element of a tensor that a node takes by a constant index."""
        if node.op_type == "Gather":
            index = self.number(node.input[1])
            if index is None or index.size != 1 or index < 0:
                return None
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            return self._element(node.input[0], int(index.item()), axis, index.ndim)
        if node.op_type == "Slice" and len(node.input) >= 4:
            given = [self.number(i) for i in node.input[1:]]
            if any(g is None or g.size != 1 for g in given):
                return None
            start, end, axis, *step = (int(g.item()) for g in given if g is not None)
            width = end - start
            if (
                start >= 0
                and 0 < width <= LONGEST_CHUNK
                and not start % width
                and step in ([], [1])
            ):
                return self._element(node.input[0], start // width, axis, width)
        return None

    def shape(self, name: str) -> list[object] | None:
        """Return the sizes of a value, names where they vary."""
        found = self.types.get(name)
        if found is None:
            constant = self.constants.get(name)
            return None if constant is None else list(constant.dims)
        return [d.dim_param or d.dim_value for d in found.type.tensor_type.shape.dim]

    def _number(self, node: onnx.NodeProto) -> None:
        """Name equal values alike, and find the last token that each depends on."""
        inputs = [self.one(i) for i in node.input]
        attributes = tuple(a.SerializeToString() for a in node.attribute)
        for i, output in enumerate(node.output):
            key = (node.domain, node.op_type, attributes, tuple(inputs), i)
            self._same[output] = self._numbers.setdefault(key, output)
        stamps = [self.stamps.get(i, -1) for i in inputs]
        if node.op_type == "Shape" or node.domain == DOMAIN:
            stamps = []  # a length; or all steps of a loop, as one tensor
        token = self.token(node)
        last = max([-1, *stamps, -1 if token is None else token.number])
        self.stamps.update({o: max(last, self.stamps.get(o, -1)) for o in node.output})

    def _small(self, name: str) -> bool:
        found = self.constants.get(name)
        return found is not None and bool(found.raw_data) and len(found.raw_data) <= 64

    def _constant_key(self, name: str) -> tuple[int, tuple[int, ...], bytes] | None:
        found = self.constants.get(name)
        if found is None or not 0 < len(found.raw_data) <= COMPARED:
            return None
        return found.data_type, tuple(found.dims), found.raw_data

    def _element(self, data: str, number: int, axis: int, width: int) -> Token | None:
        """Return an element along an axis whose length varies."""
        found = self.types.get(data)
        dims = found.type.tensor_type.shape.dim if found is not None else []
        if not dims or not dims[axis % len(dims)].dim_param:
            return None
        return Token(self.one(data), number, axis % len(dims), width)


def alike(one: onnx.NodeProto, other: onnx.NodeProto) -> bool:
    """Return whether two nodes compute the same function."""
    return (
        one.op_type == other.op_type
        and one.domain == other.domain
        and len(one.input) == len(other.input)
        and [a.SerializeToString() for a in one.attribute]
        == [a.SerializeToString() for a in other.attribute]
    )
