"""The op ``linexport.LinearAttention``: attention as a running sum; formulas are in ``oracle``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import defs, helper

from linexport.plugins.ops import feature_map
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import bidirectional, chunk, pair_blocks, single_numbers
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap, absorbed_map
from linexport.plugins.ops.linear_attention.decay_scale import SCALE, multiplied_out
from linexport.plugins.ops.linear_attention.oracle import linear_attention
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec
from linexport.plugins.ops.op import (
    DOMAIN,
    FLOATING,
    VERSION,
    Attributes,
    Inputs,
    Node,
    Op,
    StatePort,
    activations,
    parameter,
    reads_causal,
)
from linexport.plugins.ops.shapes import PartialShape

__all__ = [
    "OP",
    "SCALE",
    "AbsorbedMap",
    "LinearAttentionSpec",
    "absorbed_map",
    "linear_attention",
    "multiplied_out",
    "single_numbers",
    "view",
]

INPUTS = (
    "query",
    "key",
    "value",
    "past_state",
    "past_normalizer",
    "decay",
    "beta",
    "key_mask",
)
"""Inputs that a lowering reads, by position; the parameters of a map follow, and SCALE."""


def view(node: Node) -> tuple[LinearAttentionSpec, AttentionSizes]:
    """The checked attributes of a node and the sizes its input shapes imply.

    Where the node applies a feature map itself, d_k is the width behind it.

    Raises:
        OpError: they contradict the definition.
    """
    spec = LinearAttentionSpec.from_attributes(dict(node.attributes))
    shapes = {name: node.shapes[name] for name in (*INPUTS, SCALE) if name in node.shapes}
    phi = absorbed_map(node)
    if phi is not None:
        shapes |= phi.mapped(shapes, spec.q_num_heads)
    return spec, spec.check(**shapes)


def _infer(node: Node) -> Sequence[PartialShape]:
    (spec, sizes), (batch, length, _) = view(node), node.shapes["query"]
    keys = (batch, spec.kv_num_heads, sizes.d_k)
    return [(batch, length, spec.output_heads * sizes.d_v), (*keys, sizes.d_v), keys]


def eager(*inputs: Any, decay_scale: Any = None, **attributes: Any) -> object:
    """Return output, present_state and present_normalizer in differentiable PyTorch."""
    from linexport.plugins.ops.linear_attention import chunk_torch

    spec = LinearAttentionSpec.from_attributes(attributes)
    return chunk_torch.linear_attention(spec, *(*inputs, decay_scale))


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[object, ...]:
    return linear_attention(LinearAttentionSpec.from_attributes(dict(attributes)), **inputs)


def _sizes(node: Node) -> dict[str, int]:
    _, sizes = view(node)
    return {"d_k": sizes.d_k, "d_v": sizes.d_v, "key_heads": sizes.key_heads}


def _describe(node: Node) -> str:
    spec, sizes = view(node)
    heads = f"{spec.q_num_heads} query, {spec.kv_num_heads} key/value heads"
    parts = [
        "causal" if spec.causal else "bidirectional",
        spec.update_rule,
        f"{heads} of {sizes.d_k} x {sizes.d_v}",
        f"normalised, eps {spec.eps:g}" if spec.normalize else "not normalised",
    ]
    return ", ".join(parts)


def _portable(node: Node) -> tuple[Body, list[str]]:
    spec, sizes = view(node)
    b, inputs, phi = Body(), node.inputs[: len(INPUTS)], absorbed_map(node)
    if not spec.causal:
        return b, bidirectional.write(b, spec, sizes, inputs, phi)
    if single_numbers.fits(spec, sizes):
        return b, single_numbers.write(b, spec, sizes, inputs, phi)
    if phi is not None and pair_blocks.fits(spec, phi):
        return b, pair_blocks.write(b, spec, sizes, inputs, phi)
    return b, chunk.write(b, spec, sizes, inputs, phi)


def _states(node: Node) -> list[StatePort]:
    spec, sizes = view(node)
    keys = (spec.kv_num_heads, sizes.d_k)
    state = StatePort(3, 1, "state", (*keys, sizes.d_v))
    normalizer = StatePort(4, 2, "normalizer", keys)
    return ([state, normalizer] if spec.normalize else [state]) if spec.causal else []


_DEFAULTS = LinearAttentionSpec(1, 1).attributes()
_HEADS = ("q_num_heads", "kv_num_heads")

OP = Op(
    schema=defs.OpSchema(
        "LinearAttention",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("query", "T", "(B, T, H_q * d_k)"),
            parameter("key", "T", "(B, T, H_k * d_k)"),
            parameter("value", "T", "(B, T, H_kv * d_v)"),
            parameter("past_state", "S", "(B, H_kv, d_k, d_v)", "Optional"),
            parameter("past_normalizer", "S", "(B, H_kv, d_k)", "Optional"),
            parameter("decay", "D", "(B, T, H_kv) or (B, T, H_kv * d_k), log space", "Optional"),
            parameter("beta", "T", "(B, T, H_kv) or (B, T, 1)", "Optional"),
            parameter("key_mask", "tensor(bool)", "(B, T), False: padded token", "Optional"),
            *(
                parameter(name, f"P{i}", "Of feature_map.", "Optional")
                for i, name in enumerate(feature_map.NAMES)
            ),
            parameter(SCALE, "S", "(H_kv, d_k), a factor of decay (B, T, H_kv)", "Optional"),
        ],
        outputs=[
            parameter("output", "T", "(B, T, max(H_q, H_kv) * d_v)"),
            parameter("present_state", "S", "(B, H_kv, d_k, d_v)", "Optional"),
            parameter("present_normalizer", "S", "(B, H_kv, d_k)", "Optional"),
        ],
        type_constraints=[
            *activations("T", "S"),
            ("D", FLOATING, "Decays; may be float32 where activations are in half precision."),
            *(
                (f"P{i}", feature_map.PARAMETER_TYPES, "As of FeatureMap.")
                for i in range(feature_map.PARAMETERS)
            ),
        ],
        attributes=[
            *(defs.OpSchema.Attribute(name, defs.OpSchema.AttrType.INT) for name in _HEADS),
            *(
                defs.OpSchema.Attribute(name, helper.make_attribute(name, value))
                for name, value in _DEFAULTS.items()
                if name not in _HEADS
            ),
            defs.OpSchema.Attribute(
                "feature_map",
                helper.make_attribute("feature_map", ""),
                "Map that the node applies to query and key itself; none by default.",
            ),
        ],
    ),
    infer=_infer,
    portable=multiplied_out(_portable),
    torch_schema="""linear_attention(
        Tensor query, Tensor key, Tensor value, Tensor? past_state, Tensor? past_normalizer,
        Tensor? decay, Tensor? beta, Tensor? key_mask, *, Tensor? decay_scale=None,
        int q_num_heads, int kv_num_heads, str update_rule, int causal, int normalize, float scale,
        float eps, int chunk_size
    ) -> (Tensor, Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys((*INPUTS[:3], "decay", "beta", "key_mask", "output"), 1),
    causal=reads_causal,
    states=_states,
    float32=lambda attributes: {"D"},
    kernels="linexport.plugins.kernels.plans.attention",
    sizes=_sizes,
    describe=_describe,
    summary="Attention as a running sum: the cost grows in step with the length.",
)
