"""A part of a graph as a model of its own: values that are known -> values to compute.

The part begins at the values that are known, or at initializers, and its functions come with it:
any ONNX Runtime runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from linexport.graph.walk import reads


def cut(
    model: onnx.ModelProto, targets: Sequence[str], known: Mapping[str, np.ndarray]
) -> onnx.ModelProto:
    """Return the model that computes ``targets`` of known values.

    Args:
        model: with its weights.
        targets: values that nodes compute; one that is known is computed all the same.
        known: values, of which those that are needed become inputs.
    """
    producer = {name: node for node in model.graph.node for name in node.output if name}
    kept, needed, weights = _behind(targets, producer, known)
    nodes = [node for node in model.graph.node if id(node) in kept]
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(known[name].dtype),
            known[name].shape,
        )
        for name in needed
    ]
    graph = helper.make_graph(
        nodes,
        "part",
        inputs,
        [onnx.ValueInfoProto(name=name) for name in targets],
        [t for t in model.graph.initializer if t.name in weights],
    )
    used = {(n.domain, n.op_type) for n in nodes}
    return helper.make_model(
        graph,
        functions=[f for f in model.functions if (f.domain, f.name) in used],
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
    )


def _behind(
    targets: Sequence[str],
    producer: Mapping[str, onnx.NodeProto],
    known: Mapping[str, np.ndarray],
) -> tuple[set[int], list[str], set[str]]:
    """Return nodes (by ``id``), the known values and the initializers that targets depend on."""
    kept: set[int] = set()
    needed: dict[str, None] = {}
    weights: set[str] = set()
    waiting = [producer[name] for name in targets]
    while waiting:
        node = waiting.pop()
        if id(node) in kept:
            continue
        kept.add(id(node))
        for name in reads(node):
            if name in known:
                needed[name] = None
            elif name in producer:
                waiting.append(producer[name])
            else:
                weights.add(name)
    return kept, list(needed), weights
