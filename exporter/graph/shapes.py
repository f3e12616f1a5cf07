"""Shapes that an exporter left out, as onnx infers them.

A shape is taken where it is whole: numbers, and symbols that the graph has already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import helper, shape_inference

from linexport.graph import surgeon

log = logging.getLogger(__name__)


@contextmanager
def completed_shapes(graph: gs.Graph) -> Iterator[None]:
    """Give values of the main graph that lack a shape the inferred one, while it is searched.

    Values that nodes of a domain of their own have come to read keep it: their ops need it.
    """
    given = _complete(graph)
    try:
        yield
    finally:
        for tensor, dtype in given:
            if not any(reader.domain for reader in tensor.outputs):
                tensor.shape, tensor.dtype = None, dtype


def _complete(graph: gs.Graph) -> list[tuple[gs.Variable, Any]]:
    """Infer the shapes that are missing; returns the values that have one now, and their dtypes."""
    made = {o.name: o for n in graph.nodes for o in n.outputs if not o.is_empty()}
    missing = {name: t for name, t in made.items() if t.shape is None}
    if not missing:
        return []
    weights = surgeon.externalize_constants(graph)
    try:
        model = shape_inference.infer_shapes(surgeon.to_model(graph), data_prop=True)
    except shape_inference.InferenceError as error:
        log.debug("shapes that are missing stay so: %s", error)
        return []
    finally:
        surgeon.restore_constants(graph, weights)
    stated = (t.shape for t in (*graph.inputs, *made.values()))
    known = {size for shape in stated for size in shape or () if isinstance(size, str)}
    found = []
    for value in model.graph.value_info:
        kind = value.type.tensor_type
        shape = [_size(dim) for dim in kind.shape.dim]
        whole = all(isinstance(size, int) or size in known for size in shape)
        if value.name in missing and kind.HasField("shape") and whole:
            tensor = missing[value.name]
            found.append((tensor, tensor.dtype))
            tensor.shape = shape
            if tensor.dtype is None:
                tensor.dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return found


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param
