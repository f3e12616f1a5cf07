"""Kernel of CausalConvWithState."""

from __future__ import annotations

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
from linexport.plugins.ops.op import Node

LARGEST = 64
"""Kernel size: the products are unrolled."""

CHUNK, BLOCK_C = 128, 8


def plan(node: Node, dtype: str, sm: int, precision: str) -> LaunchPlan:
    """See ``plugins.kernels.plan``."""
    channels, _, size = node.shapes["weight"]
    if not isinstance(channels, int) or not isinstance(size, int):
        raise UnsupportedModelError(
            f"CausalConvWithState has a weight of shape {tuple(node.shapes['weight'])}; the kernel "
            "needs a fixed one."
        )
    if size > LARGEST:
        raise UnsupportedModelError(
            f"CausalConvWithState has kernel size {size}; the kernel takes at most {LARGEST}."
        )
    constants = {
        "CHANNELS": channels,
        "SIZE": size,
        "SILU": node.attributes.get("activation", "none") != "none",
        "BLOCK_C": BLOCK_C,
        "BLOCK_S": max(1 << (size - 1).bit_length(), 2),
        "CHUNK": CHUNK,
    }
    element = f"*{TYPES[dtype]}"
    present = {name for name in node.inputs if name} | {"output", "present_state"}
    arguments = []
    for name in ("input", "weight", "bias", "past_state", "output", "present_state"):
        if name in present:
            arguments.append(Argument(name, element))
        else:
            constants[name] = None
    arguments.append(Argument("length", "i32"))
    kernel = Kernel(
        "causal_conv.convolve", tuple(arguments), tuple(constants.items()), warps=4, stages=1
    )
    blocks = Extent(-(-channels // BLOCK_C), ("batch",))
    route = Route((Launch(kernel, (blocks, Extent(1, ("chunks",)), Extent(1))),))
    return LaunchPlan(route, chunk=CHUNK, in_place=("present_state",))
