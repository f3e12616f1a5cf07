"""Ranks of Einsum's operands: ONNX Runtime ends the process where one is too small.

It compares rank and equation where it can tell a rank before the graph runs, and else does not. So
every operand's rank has to follow from the inputs, the weights and the operators; shapes that the
file states of values in between are not believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, helper, inliner, shape_inference

from linexport.errors import UnsupportedModelError
from linexport.graph.walk import all_graphs, all_nodes, all_tensors, subgraphs
from linexport.sources.files import first_line
from linexport.sources.onnx_file.external import stored_bytes

EINSUM = "Einsum"
RANK_KEPT = {
    ("com.microsoft", "CausalConvWithState"): (0, 3),
    ("com.microsoft", "LinearAttention"): (0, 3),
    ("com.microsoft", "MatMulNBits"): (0,),
}
"""Operators of ONNX Runtime in artifacts, of which onnx knows no shapes: the input that each output
has the rank of."""

STATE_RANK = {"CausalConvWithState": 3, "LinearAttention": 4}
"""Rank of a state that none was given for."""

SHAPES = 2**12
"""Bytes of a tensor that may be a shape; the values of larger ones are not looked at."""

ROUNDS, MOST_AXES = 16, 64
"""How often shapes are inferred, and the largest rank inferred from the length of a shape."""

_LARGEST = 2**28
"""Bytes of a graph, without its weights, that shapes are inferred of, since that copies it."""


def check_ranks(path: Path, model: onnx.ModelProto) -> None:
    """Check the operands of every Einsum in a graph, in its subgraphs and in its functions.

    Args:
        path: the file it was read from, in the folder of its checked external data.
        model: with the values of its small weights, internal or external.

    Raises:
        UnsupportedModelError: a rank is not the one of the equation, or is unknown.
    """
    if not any(node.op_type == EINSUM for node in all_nodes(model)):
        return
    bare = _bare(path, model)
    try:
        _check_equations(bare)
        plain = inliner.inline_local_functions(bare)
        _keep_ranks(plain)
        unknown = sorted(set(_unranked(_inferred(plain).graph, set())))
    except (ValueError, RuntimeError, shape_inference.InferenceError) as error:
        raise UnsupportedModelError(f"its shapes are unknown: {first_line(error)}") from error
    if unknown:
        raise UnsupportedModelError(
            f"an Einsum reads {unknown[0]!r}, whose number of dimensions is known only when the "
            "graph runs; expected one that follows from the inputs and the operators"
        )


def _check_equations(bare: onnx.ModelProto) -> None:
    try:
        shape_inference.infer_shapes(bare, strict_mode=True)
    except shape_inference.InferenceError as error:
        # An operand without a type is the fault of the node it comes from.
        found = [line for line in str(error).splitlines() if f"op_type:{EINSUM}" in line]
        wrong = [line for line in found if "TypeInferenceError" not in line]
        if wrong:
            raise UnsupportedModelError(f"its shapes contradict each other: {wrong[0]}") from error


def _bare(path: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model without large weights, and without stated shapes except those of its inputs."""
    if model.ByteSize() - sum(t.ByteSize() for t in model.graph.initializer) > _LARGEST:
        raise UnsupportedModelError(
            "it has an Einsum and more than 256 MiB of constants in its nodes; expected "
            "initializers"
        )
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = model.graph.name
    bare.graph.node.extend(model.graph.node)
    bare.graph.input.extend(model.graph.input)
    bare.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        small = tensor if tensor.ByteSize() <= SHAPES else _without_values(tensor)
        bare.graph.initializer.append(small)
    for tensor in all_tensors(bare):
        if tensor.data_location == TensorProto.EXTERNAL and stored_bytes(tensor) <= SHAPES:
            tensor.raw_data = _stored(path, tensor)
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    for graph in all_graphs(bare):
        del graph.value_info[:]
        inner = [] if graph is bare.graph else graph.input
        for value in [*graph.output, *inner]:
            if value.type.tensor_type.HasField("shape"):
                value.type.tensor_type.ClearField("shape")
    for function in bare.functions:
        del function.value_info[:]
    return bare


def _stored(path: Path, tensor: TensorProto) -> bytes:
    """Read external data; onnx's own reader refuses data that have a second hard link."""
    entry = {e.key: e.value for e in tensor.external_data}
    with (path.parent / entry["location"]).open("rb") as data:
        data.seek(int(entry.get("offset") or 0))
        return data.read(stored_bytes(tensor))


def _without_values(tensor: TensorProto) -> TensorProto:
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def _keep_ranks(model: onnx.ModelProto) -> None:
    """Put nodes that onnx knows in the place of operators that keep ranks."""
    for graph in all_graphs(model):
        nodes = [one for node in graph.node for one in _of_the_ranks(node)]
        del graph.node[:]
        graph.node.extend(nodes)


def _of_the_ranks(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    kept = RANK_KEPT.get((node.domain, node.op_type))
    if kept is None:
        return [node]
    made = []
    for place, output in zip(kept, node.output, strict=False):
        given = node.input[place] if place < len(node.input) else ""
        if given and output:
            made.append(helper.make_node("Identity", [given], [output]))
        elif output:
            sizes, shape = [1] * (STATE_RANK[node.op_type] - 1) + [-1], f"{output}/shape"
            made.append(helper.make_node("Constant", [], [shape], value_ints=sizes))
            made.append(helper.make_node("Reshape", [node.input[0], shape], [output]))
    return made


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Infer shapes, and ranks that follow from the length of a shape alone.

    onnx infers nothing of a Reshape or an Expand to a shape that is computed, or of a value that
    it knows nothing of.
    """
    found = shape_inference.infer_shapes(model)
    for _ in range(ROUNDS):
        changed = [_shaped(graph) for graph in all_graphs(found)]
        if not any(changed):
            break
        found = shape_inference.infer_shapes(found)
    return found


def _shaped(graph: onnx.GraphProto) -> bool:
    """Write the ranks that follow from the lengths of shapes; return whether there were any."""
    own = [*graph.input, *graph.output, *graph.value_info]
    shapes = {v.name: v.type.tensor_type.shape for v in own if _has_shape(v)}
    lengths = {name: s.dim[0].dim_value for name, s in shapes.items() if len(s.dim) == 1}
    lengths |= {t.name: t.dims[0] for t in graph.initializer if len(t.dims) == 1}
    ranks = {name: len(shape.dim) for name, shape in shapes.items()}
    ranks |= {t.name: len(t.dims) for t in graph.initializer}
    stated = {value.name: value for value in own}
    changed = False
    for node in graph.node:
        if node.op_type not in ("Reshape", "Expand") or len(node.input) != 2:
            continue
        rank = lengths.get(node.input[1], 0)
        if node.op_type == "Expand":  # to the rank of whichever has more
            rank = max(rank, ranks[node.input[0]]) if rank and node.input[0] in ranks else 0
        value = stated.get(node.output[0])
        if 0 < rank <= MOST_AXES and value is not None and not _has_shape(value):
            value.type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * rank)
            changed = True
    return changed


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def _unranked(graph: onnx.GraphProto, around: set[str]) -> Iterator[str]:
    """Yield operands of Einsum whose rank was not inferred; ``around``: values that have one."""
    own = [*graph.input, *graph.output, *graph.value_info]
    named = {value.name for value in own} | {name for node in graph.node for name in node.output}
    ranked = around - named | {tensor.name for tensor in graph.initializer}
    ranked |= {v.name for v in own if _has_shape(v)}
    for node in graph.node:
        if node.op_type == EINSUM:
            yield from (name for name in node.input if name not in ranked)
        for inner in subgraphs(node):
            yield from _unranked(inner, ranked)
