"""What an exporter without optimiser writes out at length -> the same values by fewer nodes.

    nodes whose inputs are all constant           -> a constant
    Shape, and Gather or Slice of it, where all
    sizes that are taken are known                -> a constant
    Identity, Slice of everything, products and quotients with 1,
    Cast, CastLike and Reshape to what it is      -> their input
    Reshape of a Reshape                          -> one Reshape
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

from linexport.loaders.onnx_file.random_ops import DRAWING

STAGE = "canonicalise"

SMALL = 2**16
"""Bytes: a constant larger than this is folded only if it does not add to the size of the file."""

END = np.iinfo(np.int64).max
"""What an exporter writes for the end of an axis."""

SAME_DTYPE = {"Add", "Sub", "Mul", "Div", "Neg", "Softmax", "Softplus", "Sigmoid", "Exp"} | {
    "Squeeze",
    "Unsqueeze",
    "Reshape",
    "Transpose",
}
"""Operators whose output has the dtype of their first input."""

NOT_A_FUNCTION = DRAWING | {"Dropout"}
"""Operators that do not give the same output for the same input."""

SEQUENCES = {"SplitToSequence", "SequenceConstruct", "SequenceInsert", "SequenceErase"}
"""Operators whose output is no tensor."""


def run(graph: gs.Graph) -> None:
    """One sweep in the order of evaluation: the inputs of a node are simplified before it is."""
    graph.toposort()
    outputs = {id(tensor) for tensor in graph.outputs}
    seen: dict[Any, list[gs.Tensor]] = {}
    for node in list(graph.nodes):
        if node.op in NOT_A_FUNCTION | SEQUENCES or any(
            _has_subgraph(v) for v in node.attrs.values()
        ):
            continue
        if any(id(tensor) in outputs for tensor in node.outputs):
            continue
        if node.op == "Reshape":
            merge_reshapes(node)
        source = passed_on(node)
        if source is not None:
            replace(node, [source])
            continue
        key = _key(node)
        if key in seen:
            replace(node, seen[key])
            continue
        folded = _folded(node, graph.opset)
        seen[key] = folded or list(node.outputs)
        if folded:
            replace(node, folded)


def merge_reshapes(node: gs.Node) -> None:
    """Let a Reshape read what the Reshape before it read."""
    before = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    shape = node.inputs[1]
    # A 0 without allowzero takes a size of the input, which must then stay the same.
    free = node.attrs.get("allowzero", 0) or (
        isinstance(shape, gs.Constant) and (shape.values != 0).all()
    )
    if before is not None and before.op == "Reshape" and free:
        node.inputs[0] = before.inputs[0]


def _has_subgraph(value: Any) -> bool:
    return isinstance(value, gs.Graph)


def made_by(tensor: gs.Tensor, op: str) -> gs.Node | None:
    """The node that computes a tensor, if it is such an operator."""
    node = tensor.inputs[0] if tensor.inputs else None
    return node if node is not None and node.op == op else None


def replace(node: gs.Node, values: list[gs.Tensor]) -> None:
    """Let the readers of a node's outputs read ``values`` instead, and drop the node.

    Values the graph says nothing of are of the type of those they replace.
    """
    for old, new in zip(node.outputs, values, strict=True):
        if isinstance(new, gs.Variable) and new.shape is None:
            new.shape, new.dtype = old.shape, old.dtype
        for reader in list(old.outputs):
            reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]
    node.inputs.clear()
    node.outputs.clear()


def passed_on(node: gs.Node) -> gs.Tensor | None:
    """The input that is the node's output as well."""
    source = node.inputs[0] if node.inputs else None
    if node.op == "Identity" or (node.op == "Slice" and _slices_nothing_off(node)):
        return source
    if node.op in ("Mul", "Div"):
        return _times_one(node)
    if node.op == "Reshape" and source is not None:
        before, after = (list(t.shape or ()) for t in (source, node.outputs[0]))
        named = before and not any(size in (None, "") for size in before)
        return source if named and before == after else None
    if node.op in ("Cast", "CastLike"):
        to = _code(node.attrs["to"]) if node.op == "Cast" else _dtype(node.inputs[1])
        return source if to is not None and _dtype(source) == to else None
    return None


def _times_one(node: gs.Node) -> gs.Tensor | None:
    """The other factor, or the dividend, where the shape is its own."""
    pairs = [tuple(node.inputs), *([tuple(reversed(node.inputs))] if node.op == "Mul" else [])]
    for other, one in pairs:
        if isinstance(one, gs.Constant) and np.prod(one.shape) == 1 and one.values.item() == 1:
            rank = len(one.shape)
            return other if rank == 0 or len(other.shape or ()) >= rank else None
    return None


def _slices_nothing_off(node: gs.Node) -> bool:
    """It takes every element from the first to beyond any last."""
    starts, ends, *rest = node.inputs[1:]
    if not all(isinstance(tensor, gs.Constant) for tensor in (ends, *rest)):
        return False
    steps = rest[1].values if len(rest) > 1 else np.ones(1)
    if not ((ends.values == END).all() and (steps == 1).all()):
        return False
    if isinstance(starts, gs.Constant):
        return bool((starts.values == 0).all())
    return bool(rest) and rest[0].values.size == 1 and _starts_a_length_before(node)


def _starts_a_length_before(node: gs.Node) -> bool:
    """The start, a value computed in the graph, is minus the size of the axis that is cut."""
    source, start, axis = node.inputs[0], _unwrapped(node.inputs[1]), node.inputs[3].values.item()
    if start is None or start.op != "Neg" or source.shape is None:
        return False
    size = _unwrapped(start.inputs[0])
    if size is None or size.op != "Shape" or size.inputs[0].shape is None:
        return False
    first = size.attrs.get("start", 0)
    sizes = list(size.inputs[0].shape)[first : size.attrs.get("end")]
    return len(sizes) == 1 and sizes[0] not in (None, "") and sizes[0] == source.shape[axis]


def _unwrapped(tensor: gs.Tensor) -> gs.Node | None:
    """The node that computed a single number, before it was made a scalar or a list of one."""
    node = tensor.inputs[0] if tensor.inputs else None
    while node is not None and node.op in ("Squeeze", "Unsqueeze", "Reshape"):
        node = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    return node


def _dtype(tensor: gs.Tensor) -> int | None:
    """ONNX's number of the dtype, found from the inputs of ``SAME_DTYPE`` where none is noted."""
    while tensor.dtype is None and tensor.inputs and tensor.inputs[0].op in SAME_DTYPE:
        tensor = tensor.inputs[0].inputs[0]
    if tensor.dtype is None and tensor.inputs and tensor.inputs[0].op == "Shape":
        return onnx.TensorProto.INT64
    return None if tensor.dtype is None else _code(tensor.dtype)


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
    sizes = _known_sizes(node, opset)
    if sizes is not None:
        return [gs.Constant(node.outputs[0].name, sizes)]
    constants = [tensor for tensor in node.inputs if not tensor.is_empty()]
    if node.domain or not constants or not all(isinstance(t, gs.Constant) for t in constants):
        return None
    large = [tensor for tensor in constants if _bytes(tensor) > SMALL]
    if any(len(tensor.outputs) > 1 for tensor in large):
        return None
    values = _evaluated(node, constants, opset)
    if any(isinstance(value, list) for value in values):  # a sequence
        return None
    values = [np.asarray(value) for value in values]
    grown = sum(v.nbytes for v in values) - sum(map(_bytes, large))
    if grown > SMALL:
        return None
    # A large one is a view of its source, which is made contiguous when it is written.
    return [
        gs.Constant(output.name, value)  # of a transpose, a view: the weight is there once
        for output, value in zip(node.outputs, values, strict=True)
    ]


def _known_sizes(node: gs.Node, opset: int) -> np.ndarray | None:
    """The sizes that a node takes of a shape, if all of them are numbers."""
    if node.domain or node.op not in ("Shape", "Gather", "Slice"):
        return None
    shape = node if node.op == "Shape" else next(iter(node.inputs[0].inputs), None)
    if shape is None or shape.op != "Shape" or shape.inputs[0].shape is None:
        return None
    sizes = list(shape.inputs[0].shape)[shape.attrs.get("start", 0) : shape.attrs.get("end")]
    places = np.arange(len(sizes))
    if node is not shape:
        if not all(isinstance(tensor, gs.Constant) for tensor in node.inputs[1:]):
            return None
        known = [gs.Constant(node.inputs[0].name, places), *node.inputs[1:]]
        places = np.asarray(_evaluated(node, known, opset)[0])
    taken = [sizes[place] for place in places.flat]
    if not all(isinstance(size, int) for size in taken):
        return None
    return np.asarray(taken, np.int64).reshape(places.shape)


def _evaluated(node: gs.Node, constants: list[gs.Constant], opset: int) -> list[Any]:
    """Arrays or numbers, and lists for sequences."""
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
    return list(ReferenceEvaluator(model).run(None, given))
