"""What an exporter without optimiser writes out at length -> the same values by fewer nodes.

    nodes whose inputs are all constant           -> a constant
    Identity, Slice of everything,
    Cast and CastLike to the own dtype            -> their input
    nodes that compute what another computes      -> that other node

Values stay the same to the bit: no constant is taken to be negligible, whatever its size.

Among the constants are the transposes torch multiplies by. Runtimes that fold them themselves may
do so after having fused them into the product, which then packs the weight again at every call. A
weight that others read as it is, such as a tied embedding, is left alone: it would be stored twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

STAGE = "canonicalise"

SMALL = 2**16
"""Bytes: a constant larger than this is folded only if it does not add to the size of the file."""

END = np.iinfo(np.int64).max
"""What an exporter writes for the end of an axis."""

NOT_A_FUNCTION = {"Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "Bernoulli"} | {
    "RandomUniformLike",
    "Multinomial",
}
"""Operators that do not give the same output for the same input."""


def run(graph: gs.Graph) -> None:
    """One sweep in the order of evaluation: the inputs of a node are simplified before it is."""
    graph.toposort()
    outputs = {id(tensor) for tensor in graph.outputs}
    seen: dict[Any, list[gs.Tensor]] = {}
    for node in list(graph.nodes):
        if node.op in NOT_A_FUNCTION or any(_has_subgraph(v) for v in node.attrs.values()):
            continue
        if any(id(tensor) in outputs for tensor in node.outputs):
            continue
        source = _passed_on(node)
        if source is not None:
            _replace(node, [source])
            continue
        key = _key(node)
        if key in seen:
            _replace(node, seen[key])
            continue
        folded = _folded(node, graph.opset)
        seen[key] = folded or list(node.outputs)
        if folded:
            _replace(node, folded)


def _has_subgraph(value: Any) -> bool:
    return isinstance(value, gs.Graph)


def _replace(node: gs.Node, values: list[gs.Tensor]) -> None:
    """Let the readers of a node's outputs read ``values`` instead, and drop the node."""
    for old, new in zip(node.outputs, values, strict=True):
        for reader in list(old.outputs):
            reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]
    node.inputs.clear()
    node.outputs.clear()


def _passed_on(node: gs.Node) -> gs.Tensor | None:
    """The input that is the node's output as well."""
    source = node.inputs[0] if node.inputs else None
    if node.op == "Identity" or (node.op == "Slice" and _slices_nothing_off(node)):
        return source
    if node.op == "Cast" and source is not None and source.dtype is not None:
        same = np.dtype(source.dtype) == helper.tensor_dtype_to_np_dtype(_code(node.attrs["to"]))
        return source if same else None
    if node.op == "CastLike" and None not in (node.inputs[0].dtype, node.inputs[1].dtype):
        return source if node.inputs[0].dtype == node.inputs[1].dtype else None
    return None


def _slices_nothing_off(node: gs.Node) -> bool:
    """It takes every element from the first to beyond any last."""
    if not all(isinstance(tensor, gs.Constant) for tensor in node.inputs[1:]):
        return False
    starts, ends = (tensor.values for tensor in node.inputs[1:3])
    steps = node.inputs[4].values if len(node.inputs) > 4 else np.ones(1)
    return bool((starts == 0).all() and (ends == END).all() and (steps == 1).all())


def _code(to: Any) -> int:
    return to if isinstance(to, int) else helper.np_dtype_to_tensor_dtype(np.dtype(to))


def _key(node: gs.Node) -> Any:
    """Equal for nodes that compute the same."""
    inputs = tuple(_value_key(tensor) for tensor in node.inputs)
    attributes = tuple(sorted((name, _attribute_key(v)) for name, v in node.attrs.items()))
    used = tuple(tensor.is_empty() for tensor in node.outputs)
    return node.domain or "", node.op, inputs, attributes, used


def _value_key(tensor: gs.Tensor) -> Any:
    if isinstance(tensor, gs.Constant) and _bytes(tensor) <= 256:
        return str(tensor.values.dtype), tensor.values.shape, tensor.values.tobytes()
    return id(tensor) if not tensor.is_empty() else None


def _attribute_key(value: Any) -> str:
    if isinstance(value, gs.Constant):
        return repr(_value_key(value))
    return repr(value)


def _bytes(tensor: gs.Constant) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


def _folded(node: gs.Node, opset: int) -> list[gs.Tensor] | None:
    """Constants of the node's outputs; None where it has other inputs or the file would grow."""
    constants = [tensor for tensor in node.inputs if not tensor.is_empty()]
    if node.domain or not constants or not all(isinstance(t, gs.Constant) for t in constants):
        return None
    large = [tensor for tensor in constants if _bytes(tensor) > SMALL]
    if any(len(tensor.outputs) > 1 for tensor in large):
        return None
    values = _evaluated(node, constants, opset)
    grown = sum(v.nbytes for v in values) - sum(map(_bytes, large))
    if grown > SMALL:
        return None
    # A large one is a view of its source, which is made contiguous when it is written.
    return [
        gs.Constant(
            output.name,
            value if value.nbytes > SMALL else np.ascontiguousarray(value).reshape(value.shape),
        )
        for output, value in zip(node.outputs, values, strict=True)
    ]


def _evaluated(node: gs.Node, constants: list[gs.Constant], opset: int) -> list[np.ndarray]:
    given = {tensor.name: tensor.values for tensor in constants}
    graph = helper.make_graph(
        [OnnxExporter.export_node(node)],
        "alone",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in given.items()
        ],
        [helper.make_value_info(tensor.name, onnx.TypeProto()) for tensor in node.outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, given)]
