"""Kernels of LinearAttention, with a feature map or without.

A few tokens take one kernel, which computes features as it reads the tokens. With more, the kernels
of chunks can do so, too; but a state is held in several blocks, each of which computes all features
again and has fewer registers for its state. Where that was measured to be slower, features are
computed once and written to scratch memory, and attention is of these.
"""

from __future__ import annotations

from dataclasses import replace

from linexport.plugins.kernels.launch import Argument, Extent, LaunchPlan, Route, Scratch
from linexport.plugins.kernels.plans import feature_map
from linexport.plugins.kernels.plans.linear_attention import Planner
from linexport.plugins.ops.op import Node

EXPONENTIAL, NARROW = ("elu1", "exp"), 64
"""Maps with an exponential for each component; the widest heads that compute it in each block."""

SUFFIX = "_features"
"""Behind the name of a query or a key: the scratch memory of its features."""


def plan(node: Node, dtype: str, sm: int, precision: str) -> LaunchPlan:
    """See ``plugins.kernels.plan``."""
    fused = Planner(node, dtype, sm, precision)
    if not _apart(fused):
        return fused.plan()
    found = Planner(_behind_the_map(node, fused), dtype, sm, precision).plan()
    single = _with_map(found.single, fused, found.chunk)
    segmented = found.segmented and _with_map(found.segmented, fused, found.chunk)
    decode = fused.decode() if found.decode else None
    return replace(found, single=single, segmented=segmented, decode=decode)


def _apart(fused: Planner) -> bool:
    """Return whether features are computed first: those of a projection; others in wide heads.

    In float32 products of three take the registers whatever the map is.
    """
    wide = fused.type != "fp32" and fused.sizes.d_k > NARROW
    return fused.map == "favor+" or (fused.map in EXPONENTIAL and wide)


def _heads(planner: Planner) -> dict[str, int]:
    return {"query": planner.spec.q_num_heads, "key": planner.sizes.key_heads}


def _behind_the_map(node: Node, fused: Planner) -> Node:
    """Return the attention of features."""
    widths = {name: heads * fused.sizes.d_k for name, heads in _heads(fused).items()}
    shapes = {
        name: (*shape[:2], widths.get(name, shape[2])) if name in widths else shape
        for name, shape in node.shapes.items()
        if name != "parameter_0"
    }
    attributes = {n: x for n, x in node.attributes.items() if n != "feature_map"}
    inputs = tuple(name if name in shapes else "" for name in node.inputs)
    return replace(node, attributes=attributes, inputs=inputs, shapes=shapes)


def _with_map(route: Route, fused: Planner, chunk: int) -> Route:
    """Return the route with its query and key in memory that the map is written to first."""
    d_k, heads, element = fused.sizes.d_k, _heads(fused), fused.type
    maps = tuple(
        feature_map.apply(
            fused.map,
            (count, fused.width, d_k),
            chunk,
            Argument(name, f"*{element}"),
            Argument(name + SUFFIX, f"*{element}"),
            "parameter_0" in fused.inputs,
            fused.sm,
            fused.product_precision(),
        )
        for name, count in heads.items()
    )
    features = tuple(
        Scratch(name + SUFFIX, element, Extent(count * d_k, ("batch", "length")))
        for name, count in heads.items()
    )
    launches = tuple(
        replace(
            launch,
            kernel=replace(
                launch.kernel,
                arguments=tuple(
                    replace(a, name=a.name + SUFFIX) if a.name in heads else a
                    for a in launch.kernel.arguments
                ),
            ),
        )
        for launch in route.launches
    )
    return Route((*maps, *launches), (*features, *route.scratch))
