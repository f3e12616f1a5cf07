"""The op ``linexport.LinearAttention``, whole: schema, checks, portable lowering, oracle."""

from __future__ import annotations

from onnx import defs, helper

from linexport.plugins.ops import feature_map
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import bidirectional, chunk, pair_blocks
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap, absorbed_map
from linexport.plugins.ops.linear_attention.decay_scale import SCALE, multiplied_out
from linexport.plugins.ops.linear_attention.oracle import linear_attention
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec, Sizes
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Node,
    Op,
    StatePort,
    activations,
    for_runtimes,
    parameter,
)

__all__ = [
    "OP",
    "SCALE",
    "AbsorbedMap",
    "LinearAttentionSpec",
    "absorbed_map",
    "linear_attention",
    "multiplied_out",
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
"""What a lowering reads, by position; the parameters of a map follow, and SCALE."""


def view(node: Node) -> tuple[LinearAttentionSpec, Sizes]:
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


def _portable(node: Node) -> tuple[Body, list[str]]:
    spec, sizes = view(node)
    b, inputs, phi = Body(), node.inputs[: len(INPUTS)], absorbed_map(node)
    if not spec.causal:
        return b, bidirectional.write(b, spec, sizes, inputs, phi)
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
        doc=str(linear_attention.__doc__),
        inputs=[
            parameter("query", "T", "(B, T, H_q * d_k)"),
            parameter("key", "T", "(B, T, H_k * d_k)"),
            parameter("value", "T", "(B, T, H_kv * d_v)"),
            parameter("past_state", "S", "(B, H_kv, d_k, d_v)", "Optional"),
            parameter("past_normalizer", "S", "(B, H_kv, d_k)", "Optional"),
            parameter("decay", "T", "(B, T, H_kv) or (B, T, H_kv * d_k), log space", "Optional"),
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
            *for_runtimes(),
        ],
    ),
    check=lambda node: (view(node), None)[1],
    portable=multiplied_out(_portable),
    states=_states,
)
