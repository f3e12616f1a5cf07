"""Large weights kept beside a graph while it is rewritten, so that its copies are small.

A graph is copied from stage to stage, and its nodes are proven on copies of parts of it. With the
weights taken out, where they go on in the memory of the original module if they can, these copies
cost nothing; they are put back when the graph is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

LARGE = 2**12
"""Values from which on a weight is kept aside."""

FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

MARK = "linexport:aside"
"""The location of data that are kept aside, by the name of their initializer."""

Weights = Mapping[str, np.ndarray]


def take(model: onnx.ModelProto, known: Weights) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A copy of a model without its large weights, and these.

    Args:
        model: its own weights are removed.
        known: arrays that may be among them, by name; one that is equal is held in the place of a
            copy.
    """
    weights: dict[str, np.ndarray] = {}
    for tensor in model.graph.initializer:
        kept = tensor.data_type in FLOATING and tensor.HasField("raw_data")
        if kept and prod(tensor.dims) >= LARGE:
            array, held = numpy_helper.to_array(tensor), known.get(tensor.name)
            weights[tensor.name] = held if held is not None and _same(held, array) else array
            _empty(tensor)
    # Memory of what was cleared goes with the message it was in.
    small = onnx.ModelProto()
    small.CopyFrom(model)
    return small, weights


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)


def put_back(model: onnx.ModelProto, weights: Weights) -> None:
    """The inverse of ``take``, in place."""
    for tensor in model.graph.initializer:
        if _is_aside(tensor):
            array = np.ascontiguousarray(weights[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def fill(graph: gs.Graph, weights: Weights) -> None:
    """Let constants of an imported graph be the weights that were taken from it."""
    for tensor in graph.tensors().values():
        stored = getattr(tensor, "_values", None)
        if isinstance(stored, LazyValues) and _is_aside(stored.tensor):
            tensor.values, tensor.data_location = weights[tensor.name], None


def empty(graph: gs.Graph) -> dict[str, np.ndarray]:
    """Take large constants out of a graph that is about to be exported; returns them."""
    weights: dict[str, np.ndarray] = {}
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and isinstance(tensor._values, np.ndarray):
            array, kind = tensor.values, helper.np_dtype_to_tensor_dtype(tensor.values.dtype)
            if array.size >= LARGE and kind in FLOATING and tensor.export_dtype == array.dtype:
                weights[tensor.name] = array
                proto = TensorProto(name=tensor.name, data_type=kind, dims=array.shape)
                _empty(proto)
                tensor.values = LazyValues(proto)
    return weights


def _empty(tensor: TensorProto) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=MARK)


def _is_aside(tensor: object) -> bool:
    return isinstance(tensor, TensorProto) and any(e.value == MARK for e in tensor.external_data)
