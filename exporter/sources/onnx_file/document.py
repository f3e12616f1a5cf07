"""Read an ONNX file: parsed, checked and in order, without its external data."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, checker

from linexport.errors import UnsupportedModelError
from linexport.graph.walk import all_nodes, count_nodes
from linexport.sources.files import first_line, refuse, unreadable
from linexport.sources.onnx_file.structure import check_structure

LARGEST = 2**31 - 1
"""Bytes a protobuf message may have; external data do not count."""

KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "linexport")
DEFAULT_INPUTS = 4
"""IR version from which an initializer of an input is its default value, and no weight."""

NAMED = 8
"""Inputs that the warning of ``overridable`` names."""

_AGAIN = "copy or download it again"
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
    except UnsupportedModelError as error:
        raise refuse(path, f"an invalid ONNX model: {error}", _EXPORT) from error
    return model


def counts(model: onnx.ModelProto) -> tuple[int, int]:
    """Nodes of the graph and its bodies, and floating-point values of its initializers."""
    floating = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    total = 0
    for tensor in model.graph.initializer:
        if tensor.data_type in floating:
            size = 1
            for dim in tensor.dims:
                size *= dim
            total += size
    return count_nodes(model.graph), total


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


def overridable(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return a warning that names the initializers that are inputs as well; empty without any.

    Callers may give such an input another value. In a file before IR version 4 every weight is
    listed so, and none can be overridden.
    """
    given = {value.name for value in model.graph.input}
    names = [tensor.name for tensor in model.graph.initializer if tensor.name in given]
    if model.ir_version < DEFAULT_INPUTS or not names:
        return ()
    others = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        "Inputs of the file that have a default value, an initializer of the same name, become "
        f"constants of that value: {', '.join(names[:NAMED])}{others}. To keep such an input, take "
        "its initializer out of the file.",
    )


def _parse(path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise refuse(
                path,
                f"an ONNX file of {size / 2**30:.1f} GiB in one piece; a protobuf ends at 2 GiB",
                "save external data: onnx.save_model(..., save_as_external_data=True)",
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
