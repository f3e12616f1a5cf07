"""Kernel of FeatureMap."""

from __future__ import annotations

from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.launch import (
    ONE,
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

CHUNK, ROWS, WARPS, WIDEST_BLOCK, NARROW = 32, 32, 4, 128, 64
"""Tokens of a chunk; rows and warps of a block, and its most features. Narrow blocks have half the
rows in float32, where with all of them favor+ spills on 9.0; others too on FEW_ROWS, where it does
with all, and on 9.0 for heads wider than WIDEST_BLOCK."""

PROJECTED_ROWS, MOST_ROWS = 64, 128
"""Rows of favor+ in half precision where a chunk has as many, in twice the warps: MOST_ROWS on 9.0,
whose wgmma reads the projection from shared memory. The projection is split once for all of them.
10.0 to 11.0 keep ROWS: for more, Triton 3.7.1 takes the tensor cores' fifth generation, and what it
made of MOST_ROWS in float16 was an empty kernel. Of ROWS, narrow blocks of float16 have half: on
9.0 and 11.0 they spill."""

FEW_ROWS = (87, 89)
"""Compute capabilities; see ROWS."""

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
    element = TYPES[dtype]
    launch = apply(
        kind,
        (heads, width, features),
        CHUNK,
        Argument("x", f"*{element}"),
        Argument("y", "*fp32" if log else f"*{element}"),
        bool(parameters),
        sm,
        precision,
        log,
    )
    return LaunchPlan(Route((launch,)), chunk=CHUNK)


def apply(
    kind: str,
    sizes: tuple[int, int, int],
    chunk: int,
    x: Argument,
    y: Argument,
    parameter: bool,
    sm: int,
    precision: str,
    log: bool = False,
) -> Launch:
    """Return the launch that computes the features of a tensor.

    Args:
        kind: of the map.
        sizes: heads, and the width of one before and behind the map.
        chunk: tokens of a chunk in the plan that has the launch.
        x: the tensor.
        y: its features, or their logarithms.
        parameter: whether the map has ``parameter_0``.
        sm: compute capability times ten.
        precision: of products in float32.
        log: see ``y``.
    """
    heads, width, features = sizes
    block = min(power(features), WIDEST_BLOCK)
    rows, warps = _rows_and_warps(kind, x.type, (width, block), chunk * heads, sm)
    constants: dict[str, Any] = {
        "HEADS": heads,
        "WIDTH": width,
        "FEATURES": features,
        "BLOCK": block,
        "CHUNK": chunk,
        "ROWS": rows,
        "MAP": kind,
        "LOG": log,
        "PRECISION": precision,
    }
    arguments = [x, y, Argument("length", "i32"), Argument("chunks", "i32")]
    if parameter:
        arguments.insert(1, Argument("parameter_0", "*fp32"))
    else:
        constants["parameter_0"] = None
    kernel = Kernel("feature_map.apply", tuple(arguments), tuple(constants.items()), warps, 1)
    blocks = -(-features // block) * -(-chunk * heads // rows)
    return Launch(kernel, (Extent(blocks, ("batch", "chunks")), ONE, ONE))


def _rows_and_warps(
    kind: str, element: str, sizes: tuple[int, int], there: int, sm: int
) -> tuple[int, int]:
    """Return those of a block, where a chunk has ``there`` rows.

    ``sizes``: the width of a head, and the features of a block.
    """
    width, block = sizes
    if element == "*fp32":
        few = block <= NARROW or sm in FEW_ROWS or (sm == 90 and width > WIDEST_BLOCK)
        return ROWS // 2 if few else ROWS, WARPS
    many = MOST_ROWS if sm == 90 else PROJECTED_ROWS
    if kind == "favor+" and there >= many and sm // 10 not in (10, 11):
        return many, 2 * WARPS
    few = kind == "favor+" and element == "*fp16" and block <= NARROW and sm in (90, 110)
    return ROWS // 2 if few else ROWS, WARPS
