"""Normalised attention with exponential features, as conversions write it: four nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.models import feature_maps
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.registry import attach_functions
from tests.support.layouts import one_op_model

OUTPUTS = ("output", "present_state", "present_normalizer", "present_key_max")
PAST = ("past_state", "past_normalizer", "past_key_max")
EPS = 0.25

Sizes = tuple[tuple[int, int], int, int, int]
"""Query heads and heads, their width, that of values, and the number of features."""


def features_of(kind: str, width: int, features: int) -> Any:
    features += features % 2 if kind == "favor+hyperbolic" else kind == "favor+flat"
    made = feature_maps.find_map(kind)
    return made(width, made.Options(features=features))


def shapes(sizes: Sizes, features: int, optional: Collection[str]) -> dict[str, list[int | str]]:
    (queries, heads), width, channels, _ = sizes
    past = (["B", heads, features, channels], ["B", heads, features], ["B", heads, features])
    found: dict[str, list[int | str]] = {
        "query": ["B", "T", queries * width],
        "key": ["B", "T", heads * width],
        "value": ["B", "T", heads * channels],
    }
    found |= dict(zip(PAST, past, strict=True)) if "past" in optional else {}
    return found | ({"key_mask": ["B", "T"]} if "mask" in optional else {})


def four_nodes(
    kind: str,
    sizes: Sizes,
    optional: Collection[str] = (),
    activation: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """Two maps, exponentials and attention; ``optional``: of "past" and "mask"."""
    (queries, heads), width, _, features = sizes
    phi = features_of(kind, width, features)
    wanted = shapes(sizes, phi.features, optional)
    types = {"key_mask": TensorProto.BOOL}
    given_ = [
        helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), s)
        for n, s in wanted.items()
    ]
    frozen = [numpy_helper.from_array(t.numpy(), f"w{i}") for i, t in enumerate(phi.frozen())]
    names = [t.name for t in frozen]
    own = LinearAttentionSpec(max(queries, heads), heads, "gated", normalize=True, eps=EPS)
    named = {n: n if n in wanted else "" for n in (*PAST, "key_mask")}
    past_state, past_normalizer, past_max, mask = named.values()
    nodes = [
        helper.make_node("Cast", ["query"], ["q"], to=activation),
        helper.make_node("Cast", ["key"], ["k"], to=activation),
    ]
    for side, count in (("query", queries), ("key", heads)):
        attributes = {"kind": kind, "side": side, "log": 1, "num_heads": count}
        name = [f"{side}_exponents"]
        nodes.append(_node("FeatureMap", [side[0], *names], name, **attributes))
    exponents = ["query_exponents", "key_exponents", past_max, mask]
    made = ["query_features", "key_features", "decay", "present_key_max"]
    counts = {"q_num_heads": queries, "k_num_heads": heads, "causal": 1}
    nodes.append(_node("StabilizedExp", exponents, made, **counts))
    read = [*made[:2], "value", past_state, past_normalizer, "decay", "", mask]
    nodes.append(_node("LinearAttention", read, list(OUTPUTS[:3]), **own.attributes()))
    served, count = max(queries, heads), phi.features
    inner = {"query_exponents": queries, "key_exponents": heads, "query_features": served}
    inner |= {"key_features": heads, "decay": heads}
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "T", h * count])
        for n, h in inner.items()
    ]
    infos += [helper.make_tensor_value_info(n[0], activation, wanted[n]) for n in ("query", "key")]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in OUTPUTS]
    model = one_op_model(nodes, given_, ends, infos)
    model.graph.initializer.extend(frozen)
    attach_functions(model)
    return model


def _node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    while not inputs[-1]:
        inputs = inputs[:-1]
    return helper.make_node(op, inputs, outputs, domain="linexport", **attributes)
