"""A graph with other outputs: values inside it that somebody wants to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import TensorProto, helper


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of a model with the named values, of floating-point numbers, as its outputs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    known = {output.name: output for output in model.graph.output}
    del changed.graph.output[:]
    changed.graph.output.extend(value_info(name, known) for name in names)
    return changed


def value_info(name: str, known: Mapping[str, onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
    """Return what is known of a value, or that it is float32 of some shape."""
    return known.get(name) or helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
