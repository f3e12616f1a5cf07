"""Products of one value with quantised weights as one product.

    MatMul(x, A), MatMul(x, B)  ->  Split(MatMul(x, [A B]))        A, B = DequantizeLinear(q, s)

The builder of TensorRT-RTX 1.7.1 joins such products as well, behind the DequantizeLinear of each:
of weights in 8 bits it then computes the matrix [A B] in every call. Joined in the graph they stay
packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Pair = tuple[onnx.NodeProto, onnx.NodeProto]
"""A DequantizeLinear and the product that reads it."""


def join_products(model: onnx.ModelProto) -> None:
    """Join the products of a model, in place.

    Args:
        model: its quantised weights (K, N) are in it, with scales along the last axis.
    """
    graph = model.graph
    stored = {t.name: t for t in graph.initializer}
    groups = [own for own in _groups(graph, stored) if len(own) > 1]
    if not groups:
        return
    gone: set[str] = set()
    made: dict[str, list[onnx.NodeProto]] = {}
    for own in groups:
        first = own[0][1].output[0]
        gone |= {name for pair in own for node in pair for name in node.output}
        gone |= {name for dequantised, _ in own for name in dequantised.input}
        made[first] = _joint(graph, stored, own, f"{first}/joint")
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.output[0] in made:
            nodes += made[node.output[0]]
        elif node.output[0] not in gone:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [t for t in graph.initializer if t.name not in gone]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _groups(graph: onnx.GraphProto, stored: dict[str, TensorProto]) -> list[list[Pair]]:
    """Return products of the same value, with weights of the same kind that nothing else reads."""
    readers = Counter(name for node in graph.node for name in node.input)
    dequantised = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
    groups: dict[tuple[str, int, int, str], list[Pair]] = {}
    for node in graph.node:
        source = dequantised.get(node.input[1]) if node.op_type == "MatMul" else None
        if source is None or any(readers[name] > 1 for name in (*source.input, node.input[1])):
            continue
        values = stored[source.input[0]]
        how = repr(sorted((a.name, a.i) for a in source.attribute))
        key = node.input[0], values.data_type, values.dims[0], how
        groups.setdefault(key, []).append((source, node))
    return list(groups.values())


def _joint(
    graph: onnx.GraphProto, stored: dict[str, TensorProto], own: Sequence[Pair], name: str
) -> list[onnx.NodeProto]:
    """Return nodes in the place of products; their weights are added to the graph."""
    parts = [f"{name}/values", f"{name}/scales"]
    for position, part in enumerate(parts):
        arrays = [numpy_helper.to_array(stored[d.input[position]]) for d, _ in own]
        graph.initializer.append(numpy_helper.from_array(np.concatenate(arrays, -1), part))
    sizes = np.asarray([stored[d.input[0]].dims[1] for d, _ in own], np.int64)
    graph.initializer.append(numpy_helper.from_array(sizes, f"{name}/sizes"))
    (first, product), matrix = own[0], f"{name}/matrix"
    how = {a.name: a.i for a in first.attribute}
    results = [node.output[0] for _, node in own]
    return [
        helper.make_node("DequantizeLinear", parts, [matrix], matrix, **how),
        helper.make_node("MatMul", [product.input[0], matrix], [name], name),
        helper.make_node("Split", [name, f"{name}/sizes"], results, f"{name}/split", axis=-1),
    ]
