"""A dequantised value that a body reads -> its copy, which ONNX Runtime does not look through.

    DequantizeLinear -> Reshape -> a body      ->      DequantizeLinear -> Reshape -> Max -> a body

ONNX Runtime moves quantisation past operators that only move values (QDQPropagation). Where the
value is then read inside of an If, Loop or Scan, and not as an input of that node, it takes an
input that the node does not have and ends the process (1.31 and 1.32). The functions of linexport's
ops have such bodies. Max of one value is a copy that no rewrite of ONNX Runtime removes.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import producer
from linexport.graph.operators import CHOICES
from linexport.plugins.ops.op import DOMAIN


def run(graph: gs.Graph) -> PassResult:
    """Copy every dequantised value that a body, or the function of an op, reads."""
    copied = [_shield(place, node) for place in _graphs(graph) for node in list(place.nodes)]
    return PassResult(any(copied))


def _graphs(graph: gs.Graph) -> list[gs.Graph]:
    return [graph, *graph.subgraphs(recursive=True)]


def _shield(place: gs.Graph, node: gs.Node) -> bool:
    """Let a node read copies of dequantised values in its bodies; return whether it does now."""
    copies: dict[int, gs.Variable] = {}
    for reader in [node] if node.domain == DOMAIN else list(_within(node)):
        for position, tensor in enumerate(reader.inputs):
            if not _is_dequantised(tensor) or _is_computed_in(tensor, node):
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy(place, node, tensor)
            reader.inputs[position] = copies[id(tensor)]
    return bool(copies)


def _within(node: gs.Node) -> Iterator[gs.Node]:
    """Yield the nodes of a node's bodies, those of bodies in them too."""
    for body in (value for value in node.attrs.values() if isinstance(value, gs.Graph)):
        for inner in body.nodes:
            yield inner
            yield from _within(inner)


def _is_computed_in(tensor: gs.Tensor, node: gs.Node) -> bool:
    return any(producer(tensor) is inner for inner in _within(node))


def _is_dequantised(tensor: gs.Tensor) -> bool:
    """Return whether a value is a dequantised one, moved or not."""
    node = producer(tensor)
    while node is not None and node.op in CHOICES | {"Dropout"} and not node.domain:
        node = producer(node.inputs[0])
    return node is not None and node.op == "DequantizeLinear"


def _copy(place: gs.Graph, node: gs.Node, tensor: gs.Tensor) -> gs.Variable:
    copy = gs.Variable(f"{node.outputs[0].name}/{tensor.name}", tensor.dtype, tensor.shape)
    place.nodes.append(gs.Node("Max", f"{copy.name}/Max", {}, [tensor], [copy]))
    return copy


PASS = Pass(
    name="shield_bodies",
    stage="tidy",
    ensures="no body or function reads a dequantised value that was moved alone",
    run=run,
)
