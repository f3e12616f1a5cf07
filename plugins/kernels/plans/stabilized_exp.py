"""Kernels of StabilizedExp."""

from __future__ import annotations

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.launch import (
    ONE,
    Argument,
    Extent,
    Kernel,
    Launch,
    LaunchPlan,
    Route,
    Scratch,
)
from linexport.plugins.kernels.plans.tile import power
from linexport.plugins.ops.op import Node, reads_causal
from linexport.plugins.ops.shapes import static_width
from linexport.plugins.ops.stabilized_exp import width_of

WIDEST = 256
"""Most features of a head: a block holds all of them, since a query is scaled by its largest."""

CHUNK = 16
RESIDENT, RESIDENT_ON_11 = {256: 2}, {256: 2, 128: 3}
"""Blocks that a multiprocessor holds, by features of a block, where they are not 4; on 11.0."""

SCALARS = ("length", "segments", "chunks_per_segment")
PARAMETERS = {
    "segment_maximum": (
        *("key", "decay", "key_mask", "past_key_max", "segment_maxima", "segment_decays"),
        *SCALARS,
    ),
    "segment_features": (
        *("query", "key", "decay", "key_mask", "past_key_max", "segment_maxima", "segment_decays"),
        *("query_features", "key_features", "present_decay", "present_key_max", *SCALARS),
    ),
}
"""Run-time parameters in the order the kernel declares them; one without a tensor is a constant."""


def plan(node: Node, dtype: str, sm: int, precision: str) -> LaunchPlan:
    """See ``plugins.kernels.plan``. All tensors are float32, whatever the activations are."""
    features = width_of(node)
    if features > WIDEST:
        raise UnsupportedModelError(
            f"StabilizedExp has heads of {features} features; the kernel takes at most {WIDEST}."
        )
    heads, causal = int(node.attributes["k_num_heads"]), reads_causal(node.attributes)
    slots = Extent(heads * features, ("batch", "segments"))
    names = ("segment_maxima", *(["segment_decays"] if "decay" in node.shapes else []))
    scratch = tuple(Scratch(name, "fp32", slots) for name in names)
    segmented = Route(
        (
            _launch(node, "segment_maximum", {*names, "past_key_max"}),
            _launch(node, "segment_features", {*names}),
        ),
        scratch,
    )
    single = Route((_launch(node, "segment_features", {"past_key_max"}),)) if causal else segmented
    return LaunchPlan(
        single,
        segmented,
        chunk=CHUNK,
        blocks=heads,
        resident=(RESIDENT_ON_11 if sm == 110 else RESIDENT).get(power(features), 4),
        in_place=("present_key_max",) if causal else (),
    )


def _launch(node: Node, function: str, memory: set[str]) -> Launch:
    """A kernel that is given what the node has, and that part of ``memory``: past and scratch."""
    heads, features = int(node.attributes["k_num_heads"]), width_of(node)
    decayed = "decay" in node.shapes
    tensors = {name for name in node.inputs if name} - {"past_key_max"}
    tensors |= {"query_features", "key_features", "present_decay", "present_key_max"}
    tensors |= memory & {*node.shapes, "segment_maxima", "segment_decays"}
    constants: dict[str, int | None] = {
        "HEADS": heads,
        "FEATURES": features,
        "DECAYS": static_width("decay", node.shapes["decay"]) // heads if decayed else 0,
        "CAUSAL": reads_causal(node.attributes),
        "BLOCK": power(features),
        "CHUNK": CHUNK,
    }
    if function == "segment_features":
        constants["QUERY_HEADS"] = int(node.attributes["q_num_heads"])
    arguments = []
    for name in PARAMETERS[function]:
        if name in SCALARS:
            arguments.append(Argument(name, "i32"))
        elif name in tensors:
            arguments.append(Argument(name, "*i8" if name == "key_mask" else "*fp32"))
        else:
            constants[name] = None
    kernel = Kernel(
        f"stabilized_exp.{function}",
        tuple(arguments),
        tuple(constants.items()),
        warps=4,
        stages=1,
    )
    return Launch(kernel, (Extent(heads, ("batch",)), Extent(1, ("segments",)), ONE))
