"""ONNX file -> the graph that passes work on.

bfloat16 becomes float32, local functions are inlined, an operator set below what linexport's
bodies need is raised, nodes and dynamic sizes get names, shapes are observed, and weights in data
files are read. Nothing else is changed, and parity with the original file proves that this changed
no result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import inliner, shape_inference

from linexport.errors import UnsupportedModelError
from linexport.graph.dims import Shape
from linexport.graph.retyped import BFLOAT16, has_bfloat16, retyped
from linexport.graph.walk import all_graphs
from linexport.plugins.ops.op import DOMAIN
from linexport.sources.loaded_model import OnnxGraph
from linexport.sources.onnx_file.document import read
from linexport.sources.onnx_file.dynamic_shapes import inputs
from linexport.sources.onnx_file.external import load_external_data
from linexport.trace.metadata import drop_metadata, source_lines
from linexport.trace.old_operators import raised
from linexport.trace.shape_probe import observe

log = logging.getLogger(__name__)


def normalise(graph: OnnxGraph) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the graph of a file as passes take it, with everything in memory.

    Also returns its author's source lines, see ``source_lines``.

    Raises:
        UnsupportedModelError: its operator set cannot be raised; or see ``document.read``.
    """
    model = read(graph.path)
    if has_bfloat16(model):
        model = retyped(model, BFLOAT16)
    model = raised(_inlined(model))
    given = inputs(model)
    for value, shape in zip(given, graph.shapes, strict=True):
        _write_shape(value, shape)
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in given]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    _name_nodes(model)
    names = [value.name for value in given]

    def feeds(sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {n: x.numpy() for n, x in zip(names, graph.draw(sizes), strict=True)}

    model = _shaped(model, observe(model, graph.path.parent, feeds, graph.sizes))
    _drop_bodies(model)
    lines = source_lines(model)
    drop_metadata(model)
    load_external_data(graph.path, model)
    return model, lines


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline local functions, except those of linexport's ops, which are understood as they are."""
    others = [f for f in model.functions if f.domain == DOMAIN]
    if len(others) < len(model.functions):
        ours = sorted({(f.domain, f.name) for f in others})
        model = inliner.inline_selected_functions(model, ours, exclude=True)
    return model


def _drop_bodies(model: onnx.ModelProto) -> None:
    """Remove the bodies of linexport's ops, which a target writes anew."""
    for node in model.graph.node:
        if node.domain == DOMAIN:
            node.overload = ""
    del model.functions[:]


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give every node a name of its own: findings, dumps and errors speak of nodes by name."""
    taken: set[str] = set()
    for node in model.graph.node:
        stem = node.name = node.name or node.op_type
        count = 1
        while node.name in taken:
            count += 1
            node.name = f"{stem}_{count}"
        taken.add(node.name)


def _shaped(model: onnx.ModelProto, seen: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
    """Return the model with the shapes that were seen, or else those that onnx infers."""
    if not seen:
        log.debug("shapes are inferred by onnx: the graph could not be observed")
        return _inferred(model)
    found = {value.name: value for value in seen}
    del model.graph.value_info[:]
    for output in model.graph.output:
        if output.name in found:
            output.type.CopyFrom(found.pop(output.name).type)
    model.graph.value_info.extend(found.values())
    # What is inside of bodies was not observed.
    return _inferred(model) if sum(1 for _ in all_graphs(model)) > 1 else model


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return shape_inference.infer_shapes(model, data_prop=True)
    except shape_inference.InferenceError as error:
        raise UnsupportedModelError(f"The file contradicts itself: {error}") from error


def _write_shape(value: onnx.ValueInfoProto, shape: Shape) -> None:
    """Write the names of the sizes of an input."""
    for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
        if isinstance(size, str):
            dim.dim_param = size
