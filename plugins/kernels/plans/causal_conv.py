"""Kernel of CausalConvTokens."""

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
from linexport.plugins.ops.op import Node

LARGEST = 64
"""Kernel size: a block holds all values of a state."""

CHUNK, BLOCK_C = 64, 64
"""Times and channels of a block."""

STATES = ("past_state", "present_state")

DECODE_LENGTH, VALUES = 4, 1024
"""Times up to which a block has all of them, and how many values of these or of a state it has."""


def plan(node: Node, dtype: str, sm: int, precision: str) -> LaunchPlan:
    """See ``plugins.kernels.plan``."""
    channels, _, size = node.shapes["weight"]
    if not isinstance(channels, int) or not isinstance(size, int):
        raise UnsupportedModelError(
            f"CausalConvTokens has a weight of shape {tuple(node.shapes['weight'])}; the kernel "
            "needs a fixed one."
        )
    if size > LARGEST:
        raise UnsupportedModelError(
            f"CausalConvTokens has kernel size {size}; the kernel takes at most {LARGEST}."
        )
    kept = max(1 << (size - 1).bit_length(), 2)
    block_c = VALUES // max(kept, DECODE_LENGTH)
    constants = {
        "CHANNELS": channels,
        "SIZE": size,
        "SILU": node.attributes.get("activation", "none") != "none",
        "BLOCK_S": kept,
    }
    few = {**constants, "BLOCK_C": block_c, "CHUNK": DECODE_LENGTH}
    many = {**constants, "BLOCK_C": min(block_c, BLOCK_C), "CHUNK": CHUNK}
    return LaunchPlan(
        Route((_launch(node, dtype, many),)),
        decode=Route((_launch(node, dtype, few),)),
        decode_length=DECODE_LENGTH,
        chunk=CHUNK,
        in_place=("present_state",),
    )


def _launch(node: Node, dtype: str, constants: dict[str, Any]) -> Launch:
    blocks = Extent(-(-constants["CHANNELS"] // constants["BLOCK_C"]), ("batch", "chunks"))
    element = f"*{TYPES[dtype]}"
    present = {name for name in node.inputs if name} | {"output", "present_state"}
    arguments = []
    for name in ("input", "weight", "bias", "past_state", "output", "present_state"):
        if name in present:
            arguments.append(Argument(name, "*fp32" if name in STATES else element))
        else:
            constants[name] = None
    arguments.append(Argument("length", "i32"))
    kernel = Kernel(
        "causal_conv.convolve", tuple(arguments), tuple(constants.items()), warps=4, stages=1
    )
    return Launch(kernel, (blocks, ONE, ONE))
