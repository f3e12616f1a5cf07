"""The op ``linexport.MixtureOfExperts``: every token through the experts its router chose.

    y_n = sum_j weight_nj down_e f(up_e x_n),   e = index_nj,   j = 0 ... k-1
    f(h) = act(h),   or gated:  f([g, u]) = act(g) * u

with soft caps, c(x) = cap tanh(x / cap):

    act(x) = x a(x)   ->   c(x) a(x) by gate_cap,        u   ->   c(u) by value_cap

N tokens x (N, H), index and weight (N, k), up (E, F, H), down (E, H_out, I) with F = I, or 2 I
where gated; y (N, H_out). The router is not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import defs, helper

from linexport.plugins.ops.mixture_of_experts.definition import (
    ACTIVATIONS,
    INPUTS,
    Array,
    ExpertFunction,
    check,
    eager,
    function_of,
    mixture_of_experts,
    view,
)
from linexport.plugins.ops.mixture_of_experts.portable import (
    SLACK,
    apply_function,
    every_expert,
    portable,
    sort_pairs,
)
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Inputs,
    Node,
    Op,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import PartialShape

__all__ = [
    "ACTIVATIONS",
    "INPUTS",
    "OP",
    "SLACK",
    "ExpertFunction",
    "apply_function",
    "check",
    "every_expert",
    "function_of",
    "mixture_of_experts",
    "sort_pairs",
    "view",
]


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return (mixture_of_experts(function_of(attributes), **inputs),)


def _infer(node: Node) -> Sequence[PartialShape]:
    return [(node.shapes["x"][0], view(node).width_out)]


def _describe(node: Node) -> str:
    sizes, function = view(node), function_of(node.attributes)
    return f"{sizes.chosen} of {sizes.experts} experts a token, {function}"


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
            defs.OpSchema.Attribute("gate_cap", helper.make_attribute("gate_cap", 0.0)),
            defs.OpSchema.Attribute("value_cap", helper.make_attribute("value_cap", 0.0)),
        ],
    ),
    infer=_infer,
    portable=portable,
    torch_schema="""mixture_of_experts(
        Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, *, str activation, int gated,
        float gate_cap=0.0, float value_cap=0.0
    ) -> Tensor""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys((*INPUTS[:3], "y"), 0),
    describe=_describe,
    summary="Every token through the few experts that its router chose.",
)
