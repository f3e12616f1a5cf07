"""The op ``linexport.MixtureOfExperts``: every token through the experts its router chose.

    y_n = sum_j weight_nj down_e f(up_e x_n),   e = index_nj,   j = 0 ... k-1
    f(h) = act(h),   or gated:  f([g, u]) = act(g) * u

N tokens x (N, H), index and weight (N, k), up (E, F, H), down (E, H_out, I) with F = I, or 2 I
where gated; y (N, H_out). The router is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import defs, helper

from linexport.plugins.ops.mixture_of_experts.definition import (
    ACTIVATIONS,
    INPUTS,
    Array,
    check,
    eager,
    mixture_of_experts,
    options_of,
    view,
)
from linexport.plugins.ops.mixture_of_experts.portable import (
    SLACK,
    apply_activation,
    every_expert,
    portable,
    sort_pairs,
)
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Node,
    Op,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import Shape

__all__ = [
    "ACTIVATIONS",
    "INPUTS",
    "OP",
    "SLACK",
    "apply_activation",
    "check",
    "every_expert",
    "mixture_of_experts",
    "options_of",
    "sort_pairs",
    "view",
]


def _oracle(attributes: Attributes, inputs: Mapping[str, Any]) -> tuple[Array, ...]:
    return (mixture_of_experts(*options_of(attributes), **inputs),)


def _infer(node: Node) -> Sequence[Shape]:
    return [(node.shapes["x"][0], view(node).width_out)]


def _describe(node: Node) -> str:
    sizes, (activation, gated) = view(node), options_of(node.attributes)
    kind = f"gated {activation}" if gated else activation
    return f"{sizes.chosen} of {sizes.experts} experts a token, {kind}"


OP = Op(
    schema=defs.OpSchema(
        "MixtureOfExperts",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("x", "T", "(N, H)"),
            parameter("index", "tensor(int64)", "(N, k), experts of each token"),
            parameter("weight", "T", "(N, k), how much each counts"),
            parameter("up", "T", "(E, F, H)"),
            parameter("down", "T", "(E, H_out, I)"),
        ],
        outputs=[parameter("y", "T", "(N, H_out)")],
        type_constraints=activations("T"),
        attributes=[
            defs.OpSchema.Attribute("activation", helper.make_attribute("activation", "silu")),
            defs.OpSchema.Attribute("gated", helper.make_attribute("gated", 1)),
        ],
    ),
    infer=_infer,
    portable=portable,
    torch_schema="""mixture_of_experts(
        Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, *, str activation, int gated
    ) -> Tensor""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys((*INPUTS[:3], "y"), 0),
    describe=_describe,
    summary="Every token through the few experts that its router chose.",
)
