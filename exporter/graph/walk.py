"""Everything of a kind in an ONNX model, subgraphs of If, Loop and Scan and local functions too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies that a node runs."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_within(graph.node)


def count_nodes(graph: onnx.GraphProto) -> int:
    """Return how many nodes a graph has, those of the bodies of its loops and choices included."""
    return sum(1 for _ in nodes_within(graph.node))


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the graph, of its subgraphs and of its local functions."""
    yield from nodes_within(model.graph.node)
    for function in model.functions:
        yield from nodes_within(function.node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph and every subgraph."""
    yield model.graph
    for node in all_nodes(model):
        yield from subgraphs(node)


def all_texts(model: onnx.ModelProto) -> Iterator[str]:
    """Every name that something else may refer to."""
    yield from (opset.domain for opset in model.opset_import)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    for graph in all_graphs(model):
        yield from (t.name for t in graph.initializer)
        for value in [*graph.input, *graph.output, *graph.value_info]:
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in all_nodes(model):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for tensor in all_tensors(model):
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the model: initializers and constants."""
    for graph in all_graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in all_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Values a node takes, those that its subgraphs take from around them included."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        own = {i.name for i in graph.input} | {t.name for t in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in reads(inner) if name not in own)
        yield from (o.name for o in graph.output if o.name not in own)


def reached(graph: onnx.GraphProto, names: Iterable[str]) -> set[str]:
    """Return the values of a graph that depend on the values of some; sizes of them do not count.

    Nodes are in order.
    """
    found = set(names)
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") and not found.isdisjoint(reads(node)):
            found.update(node.output)
    return found


def rename_values(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Give values that nodes make and read other names, in place, in subgraphs too.

    Args:
        graph: whose own inputs, outputs and stored shapes keep their names.
        renamed: old to new.
    """
    for node in nodes_within(graph.node):
        for names in (node.input, node.output):
            if not renamed.keys().isdisjoint(names):
                names[:] = [renamed.get(name, name) for name in names]
        for body in subgraphs(node):
            for output in body.output:
                output.name = renamed.get(output.name, output.name)
