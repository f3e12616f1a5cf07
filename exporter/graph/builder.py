"""Nodes written as Python expressions, with the types and shapes of what they compute.

    builder = NodeBuilder("gate")
    op = builder.op
    y = op.Mul(op.Sigmoid(x), 0.5)                  # a number is a constant of the type of x
    z = op.Reshape(y, [0, 0, heads, -1])            # integers are a constant, too
    builder.nodes                                   # in the order of evaluation

A type or shape that is not given is what onnx infers for the one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from linexport.graph.dims import Shape
from linexport.graph.inference import inferred_outputs
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import all_ops

Operand = gs.Tensor | np.ndarray | float | Sequence[int]
"""A tensor, or what becomes a constant: an array, a number, or integers such as axes and sizes."""

DType = np.dtype[np.generic]


class Operator(Protocol):
    """Writes one node of an operator of one output."""

    def __call__(
        self,
        *inputs: Operand,
        dtype: DType | None = None,
        shape: Shape | None = None,
        **attributes: object,
    ) -> gs.Variable:
        """Return the output; ``dtype`` and ``shape`` are inferred where they are not given."""


class Operators:
    """Operators by their names, which write nodes of a builder."""

    def __init__(self, builder: NodeBuilder) -> None:
        self._builder = builder

    def __getattr__(self, op: str) -> Operator:
        if op not in all_ops() and not onnx.defs.has(op):
            raise AttributeError(f"{op!r} is neither an operator of ONNX nor of linexport")

        def write(
            *inputs: Operand,
            dtype: DType | None = None,
            shape: Shape | None = None,
            **attributes: object,
        ) -> gs.Variable:
            tensors = self._builder.tensors(inputs)
            return self._builder.add(op, tensors, dtype, attrs=attributes, shape=shape)

        return write


class NodeBuilder:
    """Nodes in the order in which they are written.

    Args:
        prefix: of all names.

    Attributes:
        nodes: those written.
    """

    def __init__(self, prefix: str) -> None:
        self.nodes: list[gs.Node] = []
        self._prefix, self._made = prefix, 0

    @property
    def op(self) -> Operators:
        """Write nodes by the names of their operators."""
        return Operators(self)

    def name(self, hint: str) -> str:
        """Return a new name."""
        self._made += 1
        return f"{self._prefix}/{hint}_{self._made}"

    def constant(
        self, hint: str, values: np.ndarray | float | Sequence[int], dtype: DType | None = None
    ) -> gs.Constant:
        """Return a constant; without a type, that of an array, or of 64 bits."""
        return gs.Constant(self.name(hint), np.asarray(values, dtype))

    def add(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        dtype: DType | None = None,
        *,
        attrs: Mapping[str, object] | None = None,
        shape: Shape | None = None,
        name: str | None = None,
    ) -> gs.Variable:
        """Write a node of one output, and return the output.

        Args:
            op: of the standard operators, or of linexport's.
            inputs: of the node.
            dtype: of the output; None: inferred.
            attrs: of the node.
            shape: of the output; None: inferred, and left out where it does not follow.
            name: of the node.
        """
        output = gs.Variable(self.name(op.lower()), dtype, None if shape is None else list(shape))
        domain = DOMAIN if op in all_ops() else None
        name = name or f"{output.name}/{op}"
        node = gs.Node(op, name, dict(attrs or {}), list(inputs), [output], domain=domain)
        if domain is None and (dtype is None or shape is None):
            found, sizes = inferred_type(node)
            output.dtype = found if dtype is None else dtype
            output.shape = sizes if shape is None else list(shape)
        self.nodes.append(node)
        return output

    def tensors(self, operands: Sequence[Operand]) -> list[gs.Tensor]:
        """Return operands as tensors; numbers get the type of the first tensor among them."""
        given = [x for x in operands if isinstance(x, gs.Tensor)]
        own = next((np.dtype(t.dtype) for t in given if t.dtype is not None), None)
        return [x if isinstance(x, gs.Tensor) else self._as_constant(x, own) for x in operands]

    def _as_constant(
        self, value: np.ndarray | float | Sequence[int], own: DType | None
    ) -> gs.Constant:
        if isinstance(value, np.ndarray):
            return self.constant("constant", value)
        if isinstance(value, int | float | np.number):
            return self.constant("number", value, own)
        return self.constant("integers", value, np.dtype(np.int64))


def inferred_type(node: gs.Node) -> tuple[DType | None, Shape | None]:
    """Return the type and the shape that onnx infers for the output of a node; None of each if not.

    A shape is taken where every size of it is a number or has a name.
    """
    found = inferred_outputs(node)
    if found is None:
        return None, None
    (kind,) = (found[o.name].tensor_type for o in node.outputs)
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type) if kind.elem_type else None
    if not kind.HasField("shape"):
        return dtype, None
    sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return dtype, None if "" in sizes else sizes
