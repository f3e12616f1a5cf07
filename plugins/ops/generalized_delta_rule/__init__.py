"""The op ``linexport.GeneralizedDeltaRule``: a state transition that is diagonal plus rank one.

For each token, with alpha_t = exp(decay_t) per key channel and scale s:

    S_t = diag(alpha_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T         S in R^{d_k x d_v}
    o_t = s q_t^T S_t

a_t reads the state before it decays, b_t writes what was read. A masked token has key, a and decay
of zero, and so leaves the state as it was. LinearAttention's delta rules are the case
a_t = alpha_t k_t, b_t = -beta_t k_t. Expressed by this op only:

    RWKV-7            S_t^T = S_{t-1}^T (diag(w_t) + a_t b_t^T) + v_t k_t^T
                      (Peng et al. 2025, arXiv 2503.14456, transposed), a_t = -kappa_t
    Gated DeltaNet-2  S_t = (I - k_t (e_t * k_t)^T) diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T
                      (Hatamizadeh et al. 2026, arXiv 2605.22791): a_t = alpha_t * e_t * k_t,
                      b_t = -k_t, and w_t * v_t as the value

Packed sequences (B, T, H*d); the state is (B, H, d_k, d_v) in float32. The portable lowering takes
chunks of tokens, and few tokens one by one; the CPU library takes tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import defs, helper

from linexport.plugins.ops.generalized_delta_rule.definition import (
    INPUTS,
    Array,
    DeltaRuleSizes,
    check,
    eager,
    generalized_delta_rule,
    view,
)
from linexport.plugins.ops.generalized_delta_rule.portable import by_blocks, portable
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Inputs,
    Node,
    Op,
    StatePort,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import (
    PartialShape,
)

__all__ = ["INPUTS", "OP", "DeltaRuleSizes", "by_blocks", "check", "generalized_delta_rule", "view"]


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return generalized_delta_rule(attributes["num_heads"], attributes.get("scale", 1.0), **inputs)


def _infer(node: Node) -> Sequence[PartialShape]:
    sizes, (batch, length, _) = view(node), node.shapes["query"]
    return [
        (batch, length, sizes.heads * sizes.d_v),
        (batch, sizes.heads, sizes.d_k, sizes.d_v),
    ]


def _describe(node: Node) -> str:
    sizes = view(node)
    return f"{sizes.heads} heads of {sizes.d_k} x {sizes.d_v}"


def _sizes(node: Node) -> dict[str, int]:
    sizes = view(node)
    return {"d_k": sizes.d_k, "d_v": sizes.d_v}


def _states(node: Node) -> list[StatePort]:
    sizes = view(node)
    return [StatePort(6, 1, "state", (sizes.heads, sizes.d_k, sizes.d_v))]


OP = Op(
    schema=defs.OpSchema(
        "GeneralizedDeltaRule",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("query", "T", "(B, T, H * d_k)"),
            parameter("key", "T", "(B, T, H * d_k)"),
            parameter("value", "T", "(B, T, H * d_v)"),
            parameter("decay", "T", "(B, T, H * d_k), log space"),
            parameter("a", "T", "(B, T, H * d_k), reads the state"),
            parameter("b", "T", "(B, T, H * d_k), writes what a read"),
            parameter("past_state", "S", "(B, H, d_k, d_v)", "Optional"),
            parameter("key_mask", "tensor(bool)", "(B, T), False: padded token", "Optional"),
        ],
        outputs=[
            parameter("output", "T", "(B, T, H * d_v)"),
            parameter("present_state", "S", "(B, H, d_k, d_v)", "Optional"),
        ],
        type_constraints=activations("T", "S"),
        attributes=[
            defs.OpSchema.Attribute("num_heads", defs.OpSchema.AttrType.INT, "H."),
            defs.OpSchema.Attribute("scale", helper.make_attribute("scale", 1.0)),
        ],
    ),
    infer=_infer,
    portable=portable,
    torch_schema="""generalized_delta_rule(
        Tensor query, Tensor key, Tensor value, Tensor decay, Tensor a, Tensor b,
        Tensor? past_state, Tensor? key_mask, *, int num_heads, float scale
    ) -> (Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys((*INPUTS[:6], "key_mask", "output"), 1),
    states=_states,
    sizes=_sizes,
    describe=_describe,
    summary="A running state that every token decays and corrects along one direction.",
)
