"""Convolutions padded by a size of the input, which ONNX's Conv does not take: Pad and then Conv.

    conv1d(u, K, padding=p)              ->    conv1d(pad(u, (p, p)), K)
    conv1d(u, K, padding=p)[..., :S]     ->    conv1d(pad(u, (p, 0)), K)[..., :S]

the second of T tokens and a kernel of L, where S + L - 1 = p + T: what is kept reads no zero behind
the tokens. So a causal convolution, p = L - 1 and S = T, is one in front of which zeros are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from linexport.system.torch_internals.sizes import expression

aten = torch.ops.aten

CONVOLUTIONS = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
}
"""Operators (input, weight, bias, stride, padding, dilation, groups), by dims of their kernels."""

PADDING = 4


def write_pads(program: torch.export.ExportedProgram) -> None:
    """Pad the inputs of convolutions whose padding is symbolic, in place."""
    graph, found = program.graph, False
    for node in graph.nodes:
        rank = CONVOLUTIONS.get(node.target)
        paddings = list(node.args[PADDING]) if rank and len(node.args) > PADDING else []
        if rank and any(isinstance(p, Node) for p in paddings):
            _pad(graph, node, paddings * (rank // len(paddings)))
            found = True
    if found:
        program.graph_module.recompile()


def _pad(graph: Graph, node: Node, paddings: list[Any]) -> None:
    behind = [0] if len(paddings) == 1 and _reads_no_end(node, paddings[0]) else paddings
    # aten.constant_pad_nd takes the last dim first.
    pads = [p for pair in zip(paddings[::-1], behind[::-1], strict=True) for p in pair]
    source = node.args[0]
    assert isinstance(source, Node)
    with graph.inserting_before(node):
        padded = graph.call_function(aten.constant_pad_nd.default, (source, pads, 0.0))
    given = source.meta["val"]
    added = [_value(p) + _value(q) for p, q in zip(paddings, behind, strict=True)]
    sizes = [n + p for n, p in zip(given.shape[-len(added) :], added, strict=True)]
    shape = (*given.shape[: -len(added)], *sizes)
    padded.meta = {**node.meta, "val": given.new_empty(shape)}
    rest = node.args[PADDING + 1 :]
    node.args = (padded, *node.args[1:PADDING], [0] * len(paddings), *rest)
    if behind != paddings:
        result = node.meta["val"]
        node.meta["val"] = result.new_empty((*result.shape[:-1], given.shape[-1]))


def _reads_no_end(node: Node, padding: object) -> bool:
    """Return whether nothing reads an output that a zero behind the tokens is in."""
    source, weight = node.args[:2]
    assert isinstance(source, Node) and isinstance(weight, Node)
    tokens, kernel = (n.meta["val"].shape[-1] for n in (source, weight))
    stride, dilation = node.args[3], node.args[5] if len(node.args) > 5 else [1]
    if [stride, dilation] != [[1], [1]] or not all(map(_begins_at_first, node.users)):
        return False
    beyond = [
        user.meta["val"].shape[-1] + kernel - 1 - tokens - _value(padding) for user in node.users
    ]
    return all(n == 0 if isinstance(n, int) else expression(n) == 0 for n in beyond)


def _begins_at_first(node: Node) -> bool:
    """Return whether a node is ``x[..., :S]``."""
    if node.target is not aten.slice.Tensor:
        return False
    given = node.args[0]
    assert isinstance(given, Node)
    rest = node.args[1:] + (0, None, None, 1)[len(node.args) - 1 :]
    axis, start, step = rest[0], rest[1], rest[3]
    return bool(axis in (-1, given.meta["val"].dim() - 1) and start in (None, 0) and step == 1)


def _value(size: object) -> Any:
    return size.meta["val"] if isinstance(size, Node) else size
