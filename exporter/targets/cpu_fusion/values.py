"""Values of a graph that a program of tokens can have: float32, axes of batch and token first.

The sizes behind these two are numbers. What nodes make of such values, where the file does not
state it, follows from the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from linexport.graph.dims import StaticShape
from linexport.plugins.ops.registry import known_shapes
from linexport.plugins.ops.shapes import Dim

LEAD = 2
"""Axes of batch and token."""

MOST_SIZES = 64
"""Elements of an int64 initializer that can be sizes or axes."""


@dataclass(frozen=True)
class Value:
    """A value of every token.

    Attributes:
        lead: sizes of batch and token.
        shape: the axes behind them.
        is_condition: it is true or false.
        is_flat: in the graph, batch, token and the first axis behind them are one axis.
    """

    lead: tuple[Dim, Dim]
    shape: StaticShape
    is_condition: bool = False
    is_flat: bool = False

    @property
    def rank(self) -> int:
        """Axes that it has in the graph."""
        return len(self.shape) + (0 if self.is_flat else LEAD)


@dataclass(frozen=True)
class TokenValues:
    """Shapes of a graph's values that a program can read, by name.

    Attributes:
        tokens: values of every token; nodes add what they make.
        weights: shapes of float32 initializers of more than one element.
        numbers: float32 initializers of one element, with their axes.
        integers: small int64 initializers.
    """

    tokens: dict[str, Value]
    weights: Mapping[str, StaticShape]
    numbers: Mapping[str, tuple[float, int]]
    integers: Mapping[str, list[int]]

    def are_known(self, name: str) -> bool:
        """Return whether a program can read a value."""
        return name in self.tokens or name in self.weights or name in self.numbers


def read_values(model: onnx.ModelProto) -> TokenValues:
    """Return what a model states of its values."""
    graph = model.graph
    weights, numbers, integers = {}, {}, {}
    for tensor in graph.initializer:
        here = tensor.data_location != TensorProto.EXTERNAL
        if tensor.data_type == TensorProto.INT64 and here and prod(tensor.dims) <= MOST_SIZES:
            integers[tensor.name] = numpy_helper.to_array(tensor).reshape(-1).tolist()
        elif tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) > 1:
            weights[tensor.name] = tuple(tensor.dims)
        elif tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) == 1 and here:
            [number] = np.ravel(numpy_helper.to_array(tensor)).tolist()
            numbers[tensor.name] = number, len(tensor.dims)
    given = {i.name for i in graph.initializer}
    types = {
        i.name: i.type.tensor_type.elem_type
        for i in (*graph.value_info, *graph.input, *graph.output)
    }
    tokens = {}
    for name, shape in known_shapes(model).items():
        if name not in given and types.get(name) == TensorProto.FLOAT:
            value = token_value(shape)
            if value is not None:
                tokens[name] = value
    return TokenValues(tokens, weights, numbers, integers)


def token_value(shape: tuple[Dim, ...]) -> Value | None:
    """Return the value of a shape, None where a program has none of it."""
    lead, rest = shape[:LEAD], shape[LEAD:]
    if not rest or any(size is None for size in lead):
        return None
    sizes = tuple(size for size in rest if isinstance(size, int) and size > 0)
    return Value((lead[0], lead[1]), sizes) if len(sizes) == len(rest) else None
