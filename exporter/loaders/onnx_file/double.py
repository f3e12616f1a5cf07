"""A graph in float64 where it says float32: the reference of what float32 loses to rounding.

Other types stay. ONNX Runtime has float64 kernels for most operators; two without one that feature
maps are made of are written out:

    Elu(x)       where(x < 0, alpha (exp(x) - 1), x)
    Softplus(x)  max(x, 0) + log(1 + exp(-|x|))
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.graph.walk import all_graphs, all_nodes, all_tensors

TYPED = {"to", "dtype"}
"""Attributes that name the type of what a node makes."""


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy, whose inputs and outputs are float64, too. Its external data must be loaded."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for graph in all_graphs(wide):
        for value in [*graph.input, *graph.output]:
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        del graph.value_info[:]
    for node in all_nodes(wide):
        _retype(node)
    for tensor in all_tensors(wide):
        if tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for nodes in [*(g.node for g in all_graphs(wide)), *(f.node for f in wide.functions)]:
        written = [made for node in nodes for made in _written_out(node)]
        del nodes[:]
        nodes.extend(written)
    return wide


def _retype(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name in TYPED and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE
        if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            values = np.asarray(helper.get_attribute_value(attribute), np.float64)
            attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(values)))


def _written_out(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    write = _FORMULAS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    return write(node) if write else [node]


class _Nodes(list[onnx.NodeProto]):
    """Nodes in the place of one; names of what they make begin with that of its output."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.output = node.output[0]

    def add(self, op: str, *inputs: str, output: str | None = None) -> str:
        name = output or f"{self.output}/wide_{len(self)}"
        self.append(helper.make_node(op, inputs, [name]))
        return name

    def number(self, value: float) -> str:
        name = f"{self.output}/wide_{len(self)}"
        constant = numpy_helper.from_array(np.asarray(value, np.float64))
        self.append(helper.make_node("Constant", [], [name], value=constant))
        return name


def _elu(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    [x], nodes = node.input, _Nodes(node)
    alpha = next((a.f for a in node.attribute if a.name == "alpha"), 1.0)
    below = nodes.add("Sub", nodes.add("Exp", x), nodes.number(1.0))
    if alpha != 1.0:
        below = nodes.add("Mul", below, nodes.number(alpha))
    negative = nodes.add("Less", x, nodes.number(0.0))
    nodes.add("Where", negative, below, x, output=nodes.output)
    return nodes


def _softplus(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    [x], nodes = node.input, _Nodes(node)
    small = nodes.add("Exp", nodes.add("Neg", nodes.add("Abs", x)))
    log = nodes.add("Log", nodes.add("Add", small, nodes.number(1.0)))
    nodes.add("Add", nodes.add("Relu", x), log, output=nodes.output)
    return nodes


_FORMULAS: dict[str, Callable[[onnx.NodeProto], list[onnx.NodeProto]]] = {
    "Elu": _elu,
    "Softplus": _softplus,
}
