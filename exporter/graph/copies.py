"""Copies of a body's nodes, as they are where its inputs are other tensors.

Nodes that have constant inputs alone become constants, so that what counts steps is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.folding import fold


def copy_nodes(
    body: gs.Graph, given: Sequence[gs.Tensor], name: str, opset: int
) -> tuple[list[gs.Node], list[gs.Tensor]]:
    """Return copies of the nodes of a body, and what its outputs are.

    Args:
        body: the body of a Loop or Scan, its nodes in the order of evaluation.
        given: tensors that stand for its inputs.
        name: begins the names of all that is made.
        opset: of the model.
    """
    known = {id(own): tensor for own, tensor in zip(body.inputs, given, strict=True)}
    nodes = _nodes(body, known, name, opset)
    return nodes, [known.get(id(tensor), tensor) for tensor in body.outputs]


def folded(tensor: gs.Tensor, opset: int) -> gs.Tensor:
    """Return the constant that a tensor is computed to be, or else the tensor."""
    node = producer(tensor)
    if node is None or any(isinstance(a, gs.Graph) for a in node.attrs.values()):
        return tensor
    inputs = [folded(given, opset) for given in node.inputs]
    outputs = [_renamed(made, "folded") for made in node.outputs]
    made = gs.Node(node.op, node.name, node.attrs, inputs, outputs, node.domain)
    values = fold(made, opset)
    disconnect([made])
    place = next(i for i, output in enumerate(node.outputs) if output is tensor)
    return tensor if values is None else values[place]


def name_apart(nodes: Sequence[gs.Node], outside: gs.Graph, name: str) -> None:
    """Give nodes that leave a body names that are theirs alone in the graph they go to.

    Args:
        nodes: of the body.
        outside: the graph, whose own values keep their names.
        name: begins the names of the nodes, and of the values that are not the graph's.
    """
    outer = {id(tensor) for tensor in outside.tensors().values()}
    read = (t for node in nodes for t in (*node.inputs, *node.outputs) if not t.is_empty())
    for tensor in {id(t): t for t in read if id(t) not in outer}.values():
        tensor.name = f"{name}/{tensor.name}"
    for node in nodes:
        node.name = f"{name}/{node.name}"


def name_constants_apart(nodes: Sequence[gs.Node], outside: gs.Graph, name: str) -> None:
    """Give constants of nodes that leave a body names that no other tensor of the graph has.

    Bodies next to each other may have the same names for different numbers.

    Args:
        nodes: those that leave.
        outside: the graph they go to.
        name: begins the new names.
    """
    taken = {tensor.name: tensor for tensor in outside.tensors().values()}
    for tensor in (t for node in nodes for t in node.inputs if isinstance(t, gs.Constant)):
        while taken.get(tensor.name, tensor) is not tensor:
            tensor.name = f"{name}/{tensor.name}"
        taken[tensor.name] = tensor


def disconnect(nodes: Sequence[gs.Node]) -> None:
    """Take nodes that are in no graph from the consumers of what they read."""
    for node in nodes:
        for body in (a for a in node.attrs.values() if isinstance(a, gs.Graph)):
            disconnect(body.nodes)
        node.inputs.clear()
        node.outputs.clear()


def _nodes(body: gs.Graph, known: dict[int, gs.Tensor], name: str, opset: int) -> list[gs.Node]:
    """Return the copies; ``known`` has the tensors that stand for others, and is added to."""
    nodes = []
    for node in body.nodes:
        inputs = [known.get(id(tensor), tensor) for tensor in node.inputs]
        outputs = [_renamed(tensor, name) for tensor in node.outputs]
        attrs = {
            key: _body(value, known, name, opset) if isinstance(value, gs.Graph) else value
            for key, value in node.attrs.items()
        }
        own = node.name or node.outputs[0].name
        made = gs.Node(node.op, f"{name}/{own}", attrs, inputs, outputs, node.domain)
        values = fold(made, opset)
        if values is None:
            nodes.append(made)
        else:
            disconnect([made])
        known.update(zip(map(id, node.outputs), values or outputs, strict=True))
    return nodes


def _body(body: gs.Graph, known: dict[int, gs.Tensor], name: str, opset: int) -> gs.Graph:
    """Return a copy of a body inside of a body."""
    inputs = [_renamed(tensor, name) for tensor in body.inputs]
    inside = known | dict(zip(map(id, body.inputs), inputs, strict=True))
    nodes = _nodes(body, inside, name, opset)
    outputs = [inside.get(id(tensor), tensor) for tensor in body.outputs]
    return gs.Graph(nodes, inputs, outputs, name=body.name, opset=opset)


def _renamed(tensor: gs.Tensor, name: str) -> gs.Variable:
    own = "" if tensor.is_empty() else f"{name}/{tensor.name}"
    return gs.Variable(own, tensor.dtype, tensor.shape)
