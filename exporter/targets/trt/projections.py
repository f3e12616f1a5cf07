"""Projections of one value as one product, where a plugin reads a result of it, or for fewer nodes.

    MatMul(x, a), MatMul(x, b)  ->  Split(MatMul(x, [a b]))

TensorRT makes one product of them as well, and then copies each result that a plugin reads. A
plugin that reads parts of the whole needs no copies.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.plugins.ops.registry import known_shapes
from linexport.targets.cpu_fusion.groups import drop_unused


def joint_projections(
    model: onnx.ModelProto, values: Collection[str] = (), least: int | None = None
) -> onnx.ModelProto:
    """Return the model with those products in one that share an operand and make such a value.

    Args:
        model: its weights are in it.
        values: the values for which products are joined.
        least: join so many products and more, whatever they make; None: for ``values`` alone.
    """
    weights = {t.name: t for t in model.graph.initializer if len(t.dims) == 2}
    shapes = known_shapes(model)
    groups: dict[tuple[str, int, int], list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is not None and not node.domain and node.output[0] in shapes:
            key = node.input[0], weight.data_type, weight.dims[0]
            groups.setdefault(key, []).append(node)
    joined = {
        nodes[0].output[0]: nodes
        for nodes in groups.values()
        if (len(nodes) > 1 and any(node.output[0] in values for node in nodes))
        or (least is not None and len(nodes) >= least)
    }
    if not joined:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    gone = {node.output[0] for nodes in joined.values() for node in nodes}
    kept: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.output[0] in joined:
            kept += _joint(made, joined[node.output[0]])
        elif node.output[0] not in gone:
            kept.append(node)
    del made.graph.node[:]
    made.graph.node.extend(kept)
    drop_unused(made.graph)
    return made


def _joint(made: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the product and the Split in the place of products; their weights are added."""
    graph, name = made.graph, f"{nodes[0].output[0]}/joint"
    weights = {t.name: t for t in graph.initializer}
    own = [numpy_helper.to_array(weights[node.input[1]]) for node in nodes]
    sizes = [weight.shape[1] for weight in own]
    weight, split = f"{name}/weight", f"{name}/sizes"
    graph.initializer.append(numpy_helper.from_array(np.concatenate(own, 1), weight))
    graph.initializer.append(numpy_helper.from_array(np.array(sizes), split))
    known = {value.name: value for value in (*graph.output, *graph.value_info)}
    info = graph.value_info.add()
    info.CopyFrom(known[nodes[0].output[0]])
    info.name = name
    info.type.tensor_type.shape.dim[-1].dim_value = sum(sizes)
    product = helper.make_node("MatMul", [nodes[0].input[0], weight], [name], name)
    results = [node.output[0] for node in nodes]
    return [product, helper.make_node("Split", [name, split], results, split, axis=-1)]
