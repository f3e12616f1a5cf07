"""Shapes that an exporter left out, as onnx infers them.

A shape is taken where it is whole: numbers, and symbols that the graph has already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_graphsurgeon as gs
from onnx import helper, shape_inference

from linexport.graph import surgeon
from linexport.graph.walk import all_graphs

log = logging.getLogger(__name__)


@contextmanager
def completed_shapes(graph: gs.Graph, *, bodies: bool = False) -> Iterator[None]:
    """Give values that lack a shape the inferred one, while the graph is searched.

    Values that nodes of a domain of their own have come to read keep it: their ops need it.

    Args:
        graph: whose values get shapes.
        bodies: whether those in the bodies of its loops and choices get theirs as well.
    """
    given = _complete(graph, bodies)
    try:
        yield
    finally:
        for tensor, dtype in given:
            if not any(reader.domain for reader in tensor.outputs):
                tensor.shape, tensor.dtype = None, dtype


def _complete(graph: gs.Graph, bodies: bool) -> list[tuple[gs.Variable, object]]:
    """Infer the shapes that are missing; returns the values that have one now, and their dtypes."""
    made = _made(graph, bodies)
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
    graphs = all_graphs(model) if bodies else (model.graph,)
    for value in (v for own in graphs for v in own.value_info):
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


def _made(graph: gs.Graph, bodies: bool) -> dict[str, gs.Variable]:
    """Return the values that nodes make, by name; without those whose name two bodies have."""
    found = {o.name: o for n in graph.nodes for o in n.outputs if not o.is_empty()}
    twice: set[str] = set()
    for body in (a for n in graph.nodes for a in n.attrs.values() if isinstance(a, gs.Graph)):
        inside = _made(body, bodies) if bodies else {}
        twice |= found.keys() & inside.keys()
        found |= inside
    return {name: tensor for name, tensor in found.items() if name not in twice}


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param
