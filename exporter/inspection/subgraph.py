"""The part of a graph around some nodes, as data that can be drawn.

Constants are notes of the nodes that read them; arithmetic on shapes is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.operators import LAYOUT
from linexport.manifest.inspected import DrawnNode, GraphPart
from linexport.plugins.ops import linear_attention

SHAPE_OPS = ("Shape", "Size", "Constant", "ConstantOfShape")
LAYOUT_OPS = LAYOUT | {"Slice", "Pad"}
MAX_NODES_DRAWN = 90
"""Nodes of a part that can still be read."""


def around(model: onnx.ModelProto, names: Collection[str], reach: int = 1) -> GraphPart:
    """Return the nodes of those names, their consumers, and ``reach`` steps of their producers."""
    graph = gs.import_onnx(model)
    arithmetic = _shape_arithmetic(graph)
    inside = [n for n in graph.nodes if n.name in set(names) and n.name not in arithmetic]
    inside = inside[:MAX_NODES_DRAWN]
    part = _Part(graph, inside, arithmetic)
    row = inside
    for _ in range(reach):
        row = [above for node in row for tensor in node.inputs for above in part.link(tensor, node)]
    chosen = {id(n) for n in inside}
    for node in inside:
        for tensor in node.outputs:
            if any(tensor is output for output in graph.outputs):
                part.edge(node.name, part.end(tensor, "output"))
            for consumer in tensor.outputs:
                if id(consumer) not in chosen and consumer.name not in arithmetic:
                    part.edge(node.name, part.add(consumer, "outside"))
    return GraphPart(tuple(part.nodes.values()), tuple(part.edges))


def _shape_arithmetic(graph: gs.Graph) -> set[str]:
    """Return the nodes whose outputs follow from shapes and constants alone."""
    found: set[str] = set()
    for node in graph.nodes:
        made = [t for t in node.inputs if not t.is_empty() and not isinstance(t, gs.Constant)]
        from_shapes = made and all(t.inputs and t.inputs[0].name in found for t in made)
        if node.op in SHAPE_OPS or (from_shapes and node.op not in ("Range", "Expand", "Trilu")):
            found.add(node.name)
    return found


class _Part:
    """Nodes and edges as they are gathered."""

    def __init__(self, graph: gs.Graph, inside: list[gs.Node], arithmetic: set[str]) -> None:
        self.graph, self.arithmetic = graph, arithmetic
        self.nodes: dict[str, DrawnNode] = {}
        self.edges: dict[tuple[str, str], None] = {}
        self.inside = {id(n) for n in inside}
        for node in inside:
            self.add(node, "inside")

    def add(self, node: gs.Node, role: str) -> str:
        """Note a node once."""
        if node.name not in self.nodes:
            output = node.outputs[0] if node.outputs else None
            self.nodes[node.name] = DrawnNode(
                id=node.name,
                op=node.op,
                note=_note(node),
                shape=_shape(output),
                role=role,
            )
        return str(node.name)

    def end(self, tensor: gs.Tensor, role: str) -> str:
        """Note an input or output of the graph once."""
        ident = f"{role}:{tensor.name}"
        self.nodes.setdefault(ident, DrawnNode(ident, tensor.name, "", _shape(tensor), role))
        return ident

    def link(self, tensor: gs.Tensor, node: gs.Node) -> list[gs.Node]:
        """Add the edge from a value's producer to a consumer; returns the producer if it is new."""
        if (
            tensor.is_empty()
            or isinstance(tensor, gs.Constant)
            or len(self.nodes) > MAX_NODES_DRAWN
        ):
            return []
        if not tensor.inputs:
            self.edge(self.end(tensor, "input"), node.name)
            return []
        source = tensor.inputs[0]
        if source.name in self.arithmetic:
            return []
        new = source.name not in self.nodes
        self.edge(self.add(source, "outside"), node.name)
        return [source] * new

    def edge(self, start: str, end: str) -> None:
        """Note a pair once."""
        self.edges[start, end] = None


def _shape(tensor: gs.Tensor | None) -> str:
    if tensor is None or tensor.shape is None:
        return ""
    return " × ".join("?" if d is None else str(d) for d in tensor.shape)


def _note(node: gs.Node) -> str:
    """Return what distinguishes a node from others of its kind: an attribute or a constant."""
    attrs = node.attrs
    if node.op == linear_attention.OP.name:
        parts = ["causal" if attrs.get("causal", 1) else "bidirectional"]
        return ", ".join([*parts, *["normalised"] * bool(attrs.get("normalize", 0))])
    for name in ("equation", "kind", "perm", "axis", "to"):
        if name in attrs:
            value = attrs[name]
            if name == "to":
                return onnx.TensorProto.DataType.Name(value).lower()
            text = value.decode() if isinstance(value, bytes) else str(value)
            return text if name in ("equation", "kind") else f"{name} {text}"
    for tensor in node.inputs:
        value = _constant(tensor)
        if value is None or node.op in LAYOUT_OPS:
            continue
        if value.size == 1:
            return f"{'axis ' * node.op.startswith('Reduce')}{value.item():.4g}"
        return f"weight {' × '.join(map(str, value.shape))}"
    return ""


def _constant(tensor: gs.Tensor) -> Any:
    if isinstance(tensor, gs.Constant):
        return np.empty(tensor.shape) if np.prod(tensor.shape) > 1 else np.asarray(tensor.values)
    node = producer(tensor, "Constant")
    if node is not None and "value" in node.attrs:
        return np.asarray(node.attrs["value"].values)
    return None
