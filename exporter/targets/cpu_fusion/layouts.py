"""Convolutions and gates on channels before tokens, as tokens before channels.

    Transpose(c * conv(b * x)), with b, c, x of Split(Transpose(y), axis=1)
        ->  c * Transpose(conv(Transpose(b * x))), with b, c, x of Split(y, axis=2)

Then a program computes the gates, and the convolution and its transposes become one node: see
``convolutions``. Nodes change together with all that they lead to, and only where nothing but
Transposes back reads what they make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from linexport.plugins.ops import causal_conv
from linexport.plugins.ops.op import DOMAIN
from linexport.targets.cpu_fusion.convolutions import PERM, turns
from linexport.targets.cpu_fusion.groups import readers_of
from linexport.targets.cpu_fusion.nodes import BINARY, UNARY, attributes

CHANNELS = (1, -2)
"""The axis of channels, where tokens are behind it."""

Readers = Mapping[str, Sequence[int]]


def with_tokens_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with such nodes the other way round, itself where it has none."""
    graph = model.graph
    region = _region(graph, readers_of(graph))
    if not region:
        return model
    turned: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if turns(node) and (index in region or node.input[0] in turned):
            name = node.input[0]
            turned[node.output[0]] = turned.get(name, name)
        elif index in region:
            nodes.extend(_turned(node, turned))
        else:
            nodes.append(_renamed(node, turned))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    for value in graph.value_info:
        dims = value.type.tensor_type.shape.dim
        if value.name in turned and len(dims) == len(PERM):
            own = made.graph.value_info.add()
            own.CopyFrom(value)
            own.name = f"{value.name}/tokens"
            own.type.tensor_type.shape.CopyFrom(
                onnx.TensorShapeProto(dim=[dims[axis] for axis in PERM])
            )
    return made


def _region(graph: onnx.GraphProto, readers: Readers) -> set[int]:
    """Return the nodes that change: those of every closed component that has a convolution."""
    component: dict[int, set[int]] = {}
    producer: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        given = [producer[name] for name in node.input if name in producer]
        if not (_follows(node, producer) if given else turns(node)):
            continue
        joined = {index}.union(*(component[i] for i in given))
        component |= dict.fromkeys(joined, joined)
        own = node.output[:1] if node.domain else node.output  # of a convolution, its state is not
        producer |= dict.fromkeys(own, index)
    region: set[int] = set()
    for own in {id(one): one for one in component.values()}.values():
        ends = [name for name, index in producer.items() if index in own]
        if any(graph.node[i].domain for i in own) and _is_closed(graph, own, ends, readers):
            region |= own
    return region


def _follows(node: onnx.NodeProto, known: Mapping[str, int]) -> bool:
    """Return whether a node that reads such values makes some, along the axes that they have."""
    if (node.domain, node.op_type) == (DOMAIN, causal_conv.OP.name):
        return node.input[0] in known and not any(name in known for name in node.input[1:])
    if node.domain:
        return False
    if node.op_type == "Split":
        return attributes(node).get("axis", 0) in CHANNELS
    return node.op_type in (*UNARY, *BINARY) and all(name in known for name in node.input)


def _is_closed(
    graph: onnx.GraphProto, own: set[int], values: Sequence[str], readers: Readers
) -> bool:
    """Return whether nothing but these nodes and Transposes back read the values."""

    def is_back(index: int) -> bool:
        if index < 0 or not turns(graph.node[index]):
            return False
        name = graph.node[index].output[0]
        return all(i >= 0 and name in graph.node[i].input for i in readers.get(name, ()))

    return all(i in own or is_back(i) for name in values for i in readers.get(name, ()))


def _turned(node: onnx.NodeProto, turned: dict[str, str]) -> list[onnx.NodeProto]:
    """Return what makes the node's values with tokens first, whose names ``turned`` gets."""
    made = _renamed(node, turned)
    if node.domain:
        name = node.output[0]
        turned[name] = f"{name}/tokens"
        before, after = f"{name}/channels", turned[name]
        into = helper.make_node("Transpose", [made.input[0]], [before], before, perm=PERM)
        made.input[0] = before
        return [into, made, helper.make_node("Transpose", [name], [after], after, perm=PERM)]
    turned |= {name: f"{name}/tokens" for name in node.output}
    made.output[:] = [turned[name] for name in node.output]
    for attribute in made.attribute:
        if attribute.name == "axis":
            attribute.i = -1
    return [made]


def _renamed(node: onnx.NodeProto, turned: Mapping[str, str]) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.input[:] = [turned.get(name, name) for name in node.input]
    return made
