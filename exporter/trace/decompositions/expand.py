"""Operators that ONNX lacks -> the nodes that compute them, once types of values are known."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from linexport.graph.walk import subgraphs
from linexport.trace.decompositions import cummax, triangular_inverse
from linexport.trace.decompositions.named_body import DOMAIN

WRITERS: dict[str, Callable[..., list[onnx.NodeProto]]] = {
    triangular_inverse.NODE: triangular_inverse.write,
    cummax.NODE: cummax.write,
}
"""Writers of each, of its input, what is known of its output, and its attributes."""


def expand(model: onnx.ModelProto) -> None:
    """Write out every such operator of a model, in place."""
    _expand(model.graph, {v.name: v for v in [*model.graph.value_info, *model.graph.input]})
    kept = [o for o in model.opset_import if o.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _expand(graph: onnx.GraphProto, types: dict[str, onnx.ValueInfoProto]) -> None:
    types = types | {v.name: v for v in [*graph.value_info, *graph.input, *graph.output]}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for body in subgraphs(node):
            _expand(body, types)
        if node.domain != DOMAIN:
            nodes.append(node)
            continue
        flags = {a.name: a.i for a in node.attribute}
        nodes += WRITERS[node.op_type](node.input[0], types[node.output[0]], **flags)
    del graph.node[:]
    graph.node.extend(nodes)
