"""An operator set raised to the one that linexport's bodies need.

    Hardmax before 13      ->  Reshape(Hardmax(Flatten(x, axis), 1), Shape(x)): it was of a matrix
    Resize, Upsample       ->  with the coordinates, and the rounding, of before 11
    all others             ->  as onnx converts them

onnx raises the first two as if they had always been what they are now.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx
from onnx import helper, numpy_helper, version_converter

from linexport.errors import UnsupportedModelError
from linexport.graph.walk import all_graphs, all_nodes
from linexport.plugins.ops.body import OPSET
from linexport.trace.messages import error_summary

log = logging.getLogger(__name__)

HARDMAX_OF_ONE_AXIS = 13
"""Operator set from which Hardmax is taken along its axis alone."""

RESIZE_WITH_COORDINATES = 11
"""Operator set from which Resize says what its coordinates are."""


def raised(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in an operator set of at least ``OPSET``; the same one where it is.

    Raises:
        UnsupportedModelError: onnx cannot raise it.
    """
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), OPSET)
    if version >= OPSET:
        return model
    log.info("raising the operator set from %d to %d", version, OPSET)
    try:
        if version < HARDMAX_OF_ONE_AXIS:
            _flatten_hardmax(model)
        if version < RESIZE_WITH_COORDINATES:
            model = version_converter.convert_version(model, RESIZE_WITH_COORDINATES - 1)
            _state_coordinates(model)
        return version_converter.convert_version(model, OPSET)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"The model has opset {version}, and onnx cannot raise it to the {OPSET} that fused "
            f"operators need: {error_summary(error)}. Export it again at opset {OPSET} or higher."
        ) from error


def _flatten_hardmax(model: onnx.ModelProto) -> None:
    for graph in all_graphs(model):
        nodes = [one for node in graph.node for one in _of_a_matrix(node)]
        del graph.node[:]
        graph.node.extend(nodes)


def _of_a_matrix(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    if node.op_type != "Hardmax" or node.domain:
        return [node]
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    [x], [y] = node.input, node.output
    return [
        helper.make_node("Shape", [x], [f"{y}/shape"]),
        helper.make_node("Flatten", [x], [f"{y}/flat"], axis=axis),
        helper.make_node("Hardmax", [f"{y}/flat"], [f"{y}/one"], node.name, axis=1),
        helper.make_node("Reshape", [f"{y}/one", f"{y}/shape"], [y]),
    ]


def _state_coordinates(model: onnx.ModelProto) -> None:
    """Write what Resize did before 11: sizes times scales, down where it enlarges, else up."""
    stored = {t.name: t for graph in all_graphs(model) for t in graph.initializer}
    stored |= {
        node.output[0]: attribute.t
        for node in all_nodes(model)
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }
    for node in all_nodes(model):
        if node.op_type == "Resize" and not node.domain:
            scales = stored.get(node.input[1])
            known = np.ones(1) if scales is None else numpy_helper.to_array(scales)
            smaller = (known <= 1).all() and (known < 1).any()
            node.attribute.extend(
                [
                    helper.make_attribute("coordinate_transformation_mode", "asymmetric"),
                    helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"),
                ]
            )
