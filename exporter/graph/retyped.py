"""A graph that computes in another floating-point type than its file says.

    float32  -> float64      the reference of what float32 loses to rounding
    float16  -> float32      that of what half precision loses
    bfloat16 -> float32      what ONNX Runtime runs on a CPU, for which it has no bfloat16 kernels

ONNX Runtime has float64 kernels for most operators. Two without one that feature maps are made of
are written out, and those that quantise are left in float32, between casts:

    Elu(x)       where(x < 0, alpha (exp(x) - 1), x)
    Softplus(x)  max(x, 0) + log(1 + exp(-|x|))
    DequantizeLinear(x, scale, zero)    Cast(DequantizeLinear(x, Cast(scale), zero))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.graph.walk import all_graphs, all_nodes, all_tensors

Kinds = Mapping[int, int]
"""Types by the types they take the place of, as ONNX numbers them."""

DOUBLE: Kinds = {TensorProto.FLOAT: TensorProto.DOUBLE}
HALF: Kinds = {TensorProto.FLOAT16: TensorProto.FLOAT}
BFLOAT16: Kinds = {TensorProto.BFLOAT16: TensorProto.FLOAT}

TYPED = {"to", "dtype", "output_dtype", "precision"}
"""Attributes that name the type of what a node makes or computes in."""

FLOAT_ONLY = {
    "DequantizeLinear": ((1,), (0,)),
    "DynamicQuantizeLinear": ((0,), (1,)),
    "QLinearConv": ((1, 4, 6), ()),
    "QLinearMatMul": ((1, 4, 6), ()),
    "QuantizeLinear": ((0, 1), ()),
}
"""Operators without float64: places of the floating inputs and outputs."""


def has_bfloat16(model: onnx.ModelProto) -> bool:
    """Return whether anything in a graph is in bfloat16, which ONNX Runtime lacks on a CPU."""
    values = (v for graph in all_graphs(model) for v in [*graph.input, *graph.output])
    kinds = {value.type.tensor_type.elem_type for value in values}
    kinds |= {tensor.data_type for tensor in all_tensors(model)}
    kinds |= {a.i for node in all_nodes(model) for a in node.attribute if a.name in TYPED}
    return TensorProto.BFLOAT16 in kinds


def retyped(model: onnx.ModelProto, kinds: Kinds) -> onnx.ModelProto:
    """Return a copy in other types, its inputs and outputs too.

    External initializers keep the type they are stored in, and are cast.
    """
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    stored = {t.name: t.data_type for graph in all_graphs(wide) for t in graph.initializer}
    for graph in all_graphs(wide):
        for value in [*graph.input, *graph.output, *graph.value_info]:
            # A value without a type has none afterwards: setting it writes "undefined".
            if value.type.tensor_type.elem_type in kinds:
                value.type.tensor_type.elem_type = kinds[value.type.tensor_type.elem_type]
    casts = [_cast(tensor, kinds) for tensor in wide.graph.initializer if _is_beside(tensor, kinds)]
    for node in all_nodes(wide):
        _retype(node, kinds)
    for tensor in all_tensors(wide):
        if tensor.data_type in kinds and tensor.data_location != TensorProto.EXTERNAL:
            dtype = helper.tensor_dtype_to_np_dtype(kinds[tensor.data_type])
            values = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    if TensorProto.DOUBLE in kinds.values():
        for nodes in [*(g.node for g in all_graphs(wide)), *(f.node for f in wide.functions)]:
            written = [made for node in nodes for made in _written_out(node, stored)]
            del nodes[:]
            nodes.extend(written)
    nodes = [*casts, *wide.graph.node]
    del wide.graph.node[:]
    wide.graph.node.extend(nodes)
    return wide


def _is_beside(tensor: TensorProto, kinds: Kinds) -> bool:
    return tensor.data_type in kinds and tensor.data_location == TensorProto.EXTERNAL


def _cast(tensor: TensorProto, kinds: Kinds) -> onnx.NodeProto:
    """Rename an initializer; return the node that makes what had its name, in the other type."""
    name = tensor.name
    tensor.name = f"{name}/stored"
    return helper.make_node("Cast", [tensor.name], [name], to=kinds[tensor.data_type])


def _retype(node: onnx.NodeProto, kinds: Kinds) -> None:
    for attribute in node.attribute:
        if attribute.name in TYPED:
            attribute.i = kinds.get(attribute.i, attribute.i)
        constant = node.op_type == "Constant" and attribute.name in ("value_float", "value_floats")
        if constant and TensorProto.FLOAT in kinds:
            dtype = helper.tensor_dtype_to_np_dtype(kinds[TensorProto.FLOAT])
            values = np.asarray(helper.get_attribute_value(attribute), dtype)
            attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(values)))


def _written_out(node: onnx.NodeProto, stored: Mapping[str, int]) -> list[onnx.NodeProto]:
    """Return nodes that ONNX Runtime has for float64 in the place of one.

    ``stored`` has the types of initializers in the file.
    """
    if node.domain not in ("", "ai.onnx"):
        return [node]
    if node.op_type in FLOAT_ONLY:
        return _in_float(node, stored)
    write = _FORMULAS.get(node.op_type)
    return write(node) if write else [node]


class _Nodes(list[onnx.NodeProto]):
    """Nodes in the place of one; names of what they make begin with that of its output."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.output = node.output[0]

    def add(self, op: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = output or f"{self.output}/wide_{len(self)}"
        self.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def number(self, value: float) -> str:
        name = f"{self.output}/wide_{len(self)}"
        constant = numpy_helper.from_array(np.asarray(value, np.float64))
        self.append(helper.make_node("Constant", [], [name], value=constant))
        return name


def _in_float(node: onnx.NodeProto, stored: Mapping[str, int]) -> list[onnx.NodeProto]:
    """Compute a node in float32; one with scales that stay in half precision is not changed."""
    inputs, outputs = FLOAT_ONLY[node.op_type]
    inputs = tuple(place for place in inputs if place < len(node.input))
    if any(stored.get(node.input[place]) == TensorProto.FLOAT16 for place in inputs):
        return [node]
    nodes = _Nodes(node)
    for place in inputs:
        node.input[place] = nodes.add("Cast", node.input[place], to=TensorProto.FLOAT)
    for attribute in node.attribute:
        if attribute.name in TYPED and attribute.i == TensorProto.DOUBLE:
            attribute.i = TensorProto.FLOAT
    made = onnx.NodeProto()
    made.CopyFrom(node)
    nodes.append(made)
    for place in outputs:
        output, made.output[place] = node.output[place], f"{node.output[place]}/float32"
        nodes.add("Cast", made.output[place], output=output, to=TensorProto.DOUBLE)
    return nodes


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
