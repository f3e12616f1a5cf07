"""Nodes that compute with sizes of tensors alone, which providers leave to the CPU on purpose.

The sizes are there already, as ONNX Runtime keeps them in the host's memory, and a reshape needs
its target there. Of values such a node has some integers, whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import TensorProto

from linexport.graph.operators import SIZES_ONLY
from linexport.graph.walk import subgraphs

ARITHMETIC = {
    *("Abs", "Add", "And", "Cast", "Concat", "Div", "Equal", "Gather", "Greater", "GreaterOrEqual"),
    *("Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
    *("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Squeeze", "Sub"),
    *("Unsqueeze", "Where"),
}
"""Operators that give no more values than they are given: no Range, Expand or CumSum."""

INTEGERS = {TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64}


def shape_arithmetic(
    nodes: Iterable[onnx.NodeProto],
    initializers: Iterable[TensorProto] = (),
    known: Iterable[str] = (),
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that read sizes, or compute integers of sizes and small constants alone.

    Args:
        nodes: in order of their values, with those of their subgraphs.
        initializers: of the graph.
        known: names of values from outside that are such integers.
    """
    names = {*known, *(tensor.name for tensor in initializers if _is_small(tensor))}
    for node in nodes:
        for graph in subgraphs(node):
            yield from shape_arithmetic(graph.node, graph.initializer, names)
        if node.op_type == "Constant" and not node.domain:
            names.update(node.output if _is_small_constant(node) else ())
        elif _is_of_shapes(node, names):
            names.update(node.output)
            yield node


def _is_of_shapes(node: onnx.NodeProto, names: set[str]) -> bool:
    if node.domain or node.op_type in SIZES_ONLY:
        return not node.domain
    types = {a.i for a in node.attribute if a.name == "to"}
    given = {name for name in node.input if name}
    return node.op_type in ARITHMETIC and given <= names and types <= INTEGERS


def _is_small(tensor: TensorProto) -> bool:
    return tensor.data_type in INTEGERS and len(tensor.dims) <= 1


def _is_small_constant(node: onnx.NodeProto) -> bool:
    (attribute,) = node.attribute
    if attribute.name == "value":
        return not attribute.ref_attr_name and _is_small(attribute.t)
    return attribute.name in {"value_int", "value_ints"}
