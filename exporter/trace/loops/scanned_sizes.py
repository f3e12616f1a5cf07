"""Dimensions that are one because a loop over tokens reads a step of each.

    Scan over x (batch, seq, 8) and reset (batch, seq_2)    ->    reset (batch, seq)

torch gives each size of an input a symbol of its own, and the steps of a loop do not tell it that
there are as many of each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
from onnx import helper

from linexport.graph.dims import DimRange
from linexport.graph.walk import all_graphs

log = logging.getLogger(__name__)


def tie(model: onnx.ModelProto, dims: Mapping[str, DimRange]) -> dict[str, DimRange]:
    """Give sizes that a Scan takes the same number of steps of one name, in place.

    Returns:
        The dimensions that are left, each within the limits of those it stands for.
    """
    left = dict(dims)
    for node in [n for n in model.graph.node if n.op_type == "Scan"]:
        steps = _steps(node, model.graph)
        tied = [d for d in left if d in steps and left[d].multiple == 1 and not left[d].batch]
        for other in tied[1:]:
            log.info("a loop takes as many steps of %s as of %s", other, tied[0])
            left[tied[0]] = _both(left[tied[0]], left.pop(other))
            _rename(model, other, tied[0])
    return left


def _steps(node: onnx.NodeProto, graph: onnx.GraphProto) -> set[str]:
    """Return the names of the sizes that a Scan takes along its axes."""
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph.input, *graph.value_info)}
    given: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    count = given["num_scan_inputs"]
    axes = given.get("scan_input_axes") or [0] * count
    data = zip(node.input[-count:], axes, strict=True)
    return {shapes[name][axis].dim_param for name, axis in data if axis < len(shapes.get(name, ()))}


def _both(one: DimRange, other: DimRange) -> DimRange:
    """Return the sizes that both ranges have."""
    most = [n for n in (one.max, other.max) if n is not None]
    return replace(one, min=max(one.min, other.min), max=min(most, default=None))


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    word = re.compile(rf"\b{re.escape(old)}\b")
    for graph in all_graphs(model):
        for info in [*graph.input, *graph.output, *graph.value_info]:
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = word.sub(new, dim.dim_param)
