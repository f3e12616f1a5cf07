"""Kernel of FeatureMap."""

from __future__ import annotations

from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.launch import (
    TYPES,
    Argument,
    Extent,
    Kernel,
    Launch,
    LaunchPlan,
    Route,
)
from linexport.plugins.kernels.plans import fused_maps
from linexport.plugins.kernels.plans.tile import power
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.shapes import width_per_head

CHUNK, WIDEST_BLOCK = 32, 128
WIDEST = 256
"""Largest width of a head before the map."""


def plan(node: Node, dtype: str, sm: int, precision: str) -> LaunchPlan:
    """See ``plugins.kernels.plan``."""
    kind, heads = str(node.attributes["kind"]), int(node.attributes["num_heads"])
    fused_maps.known(kind)
    log = bool(node.attributes.get("log", 0))
    if log and kind != "favor+":
        raise UnsupportedModelError(
            f"No kernel computes logarithms of the feature map {kind!r}; there is one for favor+."
        )
    width = width_per_head("x", node.shapes["x"], heads)
    if width > WIDEST:
        raise UnsupportedModelError(
            f"FeatureMap has heads of width {width}; the kernel takes at most {WIDEST}."
        )
    parameters = feature_map.parameters_of(node, feature_map.NAMES)
    features = feature_map.formulas(kind).features(width, *(p.shape for p in parameters))
    block = min(power(features), WIDEST_BLOCK)
    constants: dict[str, Any] = {
        "HEADS": heads,
        "WIDTH": width,
        "FEATURES": features,
        "BLOCK": block,
        "CHUNK": CHUNK,
        "MAP": kind,
        "LOG": log,
        "PRECISION": precision,
    }
    element = f"*{TYPES[dtype]}"
    arguments = [Argument("x", element)]
    if parameters:
        arguments.append(Argument("parameter_0", "*fp32"))
    else:
        constants["parameter_0"] = None
    arguments += [Argument("y", "*fp32" if log else element), Argument("length", "i32")]
    kernel = Kernel("feature_map.apply", tuple(arguments), tuple(constants.items()), 4, 1)
    blocks = Extent(heads * -(-features // block), ("batch",))
    route = Route((Launch(kernel, (blocks, Extent(1, ("chunks",)), Extent(1))),))
    return LaunchPlan(route, chunk=CHUNK)
