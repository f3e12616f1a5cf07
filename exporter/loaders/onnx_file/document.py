"""Reading an ONNX file: parsed, checked and in order, without the weights that lie beside it."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, checker, shape_inference

from linexport.errors import UnsupportedModelError
from linexport.loaders.files import first_line, refuse, unreadable
from linexport.loaders.onnx_file.structure import check_structure
from linexport.loaders.onnx_file.walk import all_nodes

LARGEST = 2**31 - 1
"""Bytes a protobuf message may have; weights beside the file do not count."""

KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "linexport")
_AGAIN = "copy or download it again"
_LARGEST_INFERRED = 2**28
"""Bytes of a model above which shapes are not inferred, since that copies the model."""
_EXPORT = "export the model again, or repair the graph with the tool that wrote it"


def read(path: Path) -> onnx.ModelProto:
    """Return the checked model, its nodes sorted; external data stay where they are.

    Raises:
        UnsupportedModelError: damaged, refused by ``check_structure``, or invalid by the checker
            of onnx.
        UsageError: the file cannot be read.
    """
    model = _parse(path)
    if not model.HasField("graph") or not model.graph.output:
        raise refuse(path, "an ONNX model without a graph, or one that has no output", _AGAIN)
    try:
        check_structure(path, model)
        _check(path, model)
        _check_ranks(model)
    except UnsupportedModelError as error:
        raise refuse(path, f"an invalid ONNX model: {error}", _EXPORT) from error
    return model


def counts(model: onnx.ModelProto) -> tuple[int, int]:
    """Nodes of the graph, and floating-point values of its initializers."""
    floating = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    total = 0
    for tensor in model.graph.initializer:
        if tensor.data_type in floating:
            size = 1
            for dim in tensor.dims:
                size *= dim
            total += size
    return len(model.graph.node), total


def custom_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """A warning that names operators of domains nobody here knows; they are kept as they are."""
    local = {(f.domain, f.name) for f in model.functions}
    names = sorted(
        {
            f"{node.domain}.{node.op_type}"
            for node in all_nodes(model)
            if node.domain not in KNOWN_DOMAINS and (node.domain, node.op_type) not in local
        }
    )
    return (f"operators of other domains are kept as they are: {', '.join(names)}",) * bool(names)


def _parse(path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise refuse(
                path,
                f"an ONNX file of {size / 2**30:.1f} GiB in one piece; a protobuf ends at 2 GiB",
                "save its weights beside it, with onnx.save_model(..., save_as_external_data=True)",
            )
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except DecodeError as error:
        raise refuse(path, f"a damaged ONNX file ({first_line(error)})", _AGAIN) from error
    return model


def _check(path: Path, model: onnx.ModelProto) -> None:
    """Run the checker of onnx, by path where there are external data: it looks for them there."""
    external = any(t.data_location == TensorProto.EXTERNAL for t in model.graph.initializer)
    try:
        checker.check_model(str(path) if external else model)
    except checker.ValidationError as error:
        if external and "topologically sorted" in str(error):
            return  # check_structure sorted the model in memory; ONNX Runtime sorts as well
        raise UnsupportedModelError(first_line(error)) from error


def _check_ranks(model: onnx.ModelProto) -> None:
    """Refuse an Einsum of inputs of other ranks than its equation: ONNX Runtime ends the process.

    Shapes that the file states between inputs and initializers are not looked at.
    """
    if model.ByteSize() > _LARGEST_INFERRED:
        return
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        shape_inference.infer_shapes(bare, strict_mode=True)
    except shape_inference.InferenceError as error:
        wrong = [line for line in str(error).splitlines() if "op_type:Einsum" in line]
        if wrong:
            raise UnsupportedModelError(f"its shapes contradict each other: {wrong[0]}") from error
    except ValueError as error:  # a constant of a data type that ONNX does not have
        raise UnsupportedModelError(first_line(error)) from error
