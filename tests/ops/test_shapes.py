"""Every refusal of the ops' checks: the message names what was found and what was expected."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from onnx import TensorProto, helper

from linexport.errors import OpError
from linexport.models import feature_maps
from linexport.plugins.ops import causal_conv, feature_map
from linexport.plugins.ops.linear_attention import OP, LinearAttentionSpec, view
from linexport.plugins.ops.linear_attention.spec import AttentionSizes
from linexport.plugins.ops.op import Node, read_node
from linexport.plugins.ops.registry import all_ops, attach_functions
from tests.support.layouts import one_op_model

SHAPES: dict[str, tuple[Any, ...]] = {
    "query": (2, 7, 4 * 3),
    "key": (2, 7, 2 * 3),
    "value": (2, 7, 2 * 5),
}
GATED: dict[str, tuple[Any, ...]] = {**SHAPES, "decay": (2, 7, 2), "beta": (2, 7, 2)}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"update_rule": "delat"}, ["'delat'", "linear, gated, delta, gated_delta"]),
        ({"q_num_heads": 0}, ["q_num_heads is 0", "at least 1"]),
        ({"kv_num_heads": -2}, ["kv_num_heads is -2", "at least 1"]),
        ({"chunk_size": 0}, ["chunk_size is 0", "at least 1"]),
        ({"q_num_heads": 3}, ["3 query heads", "2 key/value heads", "multiple"]),
        ({"q_num_heads": 2, "kv_num_heads": 5}, ["2 query heads", "5 key/value heads"]),
        ({"update_rule": "delta", "normalize": True}, ["normalize=1", "'delta'", "normalize=0"]),
        ({"update_rule": "gated_delta", "normalize": True}, ["normalize=1", "'gated_delta'"]),
        ({"update_rule": "gated", "causal": False}, ["causal=0", "'gated'", "causal=1"]),
        ({"update_rule": "delta", "causal": False}, ["causal=0", "'delta'", "'linear'"]),
    ],
)
def test_attributes(attributes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OpError) as error:
        LinearAttentionSpec(**{"q_num_heads": 4, "kv_num_heads": 2, **attributes})
    assert [w for w in words if w not in str(error.value)] == []


@pytest.mark.parametrize("missing", ["q_num_heads", "kv_num_heads"])
def test_required_attributes(missing: str) -> None:
    attributes = LinearAttentionSpec(2, 2).attributes()
    del attributes[missing]
    with pytest.raises(OpError, match=f"lacks the attribute {missing}"):
        LinearAttentionSpec.from_attributes(attributes)


def test_attributes_make_a_round_trip() -> None:
    spec = LinearAttentionSpec(4, 2, "linear", False, True, 0.5, 1e-6, 16)
    assert spec.attributes()["causal"] == 0
    assert LinearAttentionSpec.from_attributes({**spec.attributes(), "other": 1}) == spec


PAST_STATE, PAST_NORMALIZER = (2, 2, 3, 5), (2, 2, 3)


@pytest.mark.parametrize(
    ("rule", "shapes", "words"),
    [
        ("linear", {"query": (2, 7, 12, 1)}, ["query", "(2, 7, 12, 1)", "3 dimensions"]),
        ("linear", {"query": (2, 7, None)}, ["query", "unknown width", "(2, 7, None)"]),
        ("linear", {"query": (2, 7, 13)}, ["query", "width 13", "4 heads"]),
        ("linear", {"query": (2, 7, 0)}, ["query", "width 0", "4 heads"]),
        ("linear", {"key": (7, 6)}, ["key", "(7, 6)", "3 dimensions"]),
        ("linear", {"key": (2, 7, "K")}, ["key", "unknown width", "'K'"]),
        ("linear", {"key": (2, 7, 7)}, ["key", "width 7", "d_k = 3", "12", "4 heads"]),
        ("linear", {"key": (2, 7, 9)}, ["key has 3 heads of 3", "kv_num_heads = 2", "divisor"]),
        ("linear", {"key": (2, 7, 12)}, ["key has 4 heads of 3", "kv_num_heads = 2"]),
        ("linear", {"key": (2, 7, 0)}, ["key has 0 heads", "kv_num_heads = 2"]),
        ("linear", {"value": (2, 7)}, ["value", "(2, 7)", "3 dimensions"]),
        ("linear", {"value": (2, 7, 9)}, ["value", "width 9", "2 heads"]),
        ("linear", {"value": (2, 7, "V")}, ["value", "unknown width"]),
        ("linear", {"key": (3, 7, 6)}, ["key has batch 3", "expected 2"]),
        ("linear", {"key": (2, 8, 6)}, ["key has length 8", "expected 7"]),
        ("linear", {"value": (3, 7, 10)}, ["value has batch 3", "expected 2"]),
        ("linear", {"value": (2, 8, 10)}, ["value has length 8", "expected 7"]),
        ("linear", {"decay": (2, 7, 2)}, ["'linear'", "does not read", "decay"]),
        ("linear", {"beta": (2, 7, 2)}, ["'linear'", "does not read", "beta"]),
        ("gated", {}, ["'gated'", "needs", "decay"]),
        ("delta", {}, ["'delta'", "needs", "beta"]),
        ("gated_delta", {"beta": (2, 7, 2)}, ["'gated_delta'", "needs", "decay"]),
        ("gated_delta", {"decay": (2, 7, 2)}, ["'gated_delta'", "needs", "beta"]),
        ("gated", {"decay": (2, 7, 3)}, ["decay has width 3", "2 or 6"]),
        ("gated", {"decay": (2, 7, 1)}, ["decay has width 1", "2 or 6"]),
        ("gated", {"decay": (2, 7, None)}, ["decay", "unknown width"]),
        ("gated", {"decay": (2, 7)}, ["decay", "(2, 7)", "3 dimensions"]),
        ("gated", {"decay": (1, 7, 2)}, ["decay has batch 1", "expected 2"]),
        ("gated", {"decay": (2, 1, 2)}, ["decay has length 1", "expected 7"]),
        ("delta", {"beta": (2, 7, 4)}, ["beta has width 4", "2 or 1"]),
        ("delta", {"beta": (2, 7)}, ["beta", "(2, 7)", "3 dimensions"]),
        ("delta", {"beta": (2, 7, "H")}, ["beta", "unknown width"]),
        ("delta", {"beta": (1, 7, 2)}, ["beta has batch 1", "expected 2"]),
        ("delta", {"beta": (2, 6, 2)}, ["beta has length 6", "expected 7"]),
        ("linear", {"key_mask": (2, 7, 1)}, ["key_mask", "(2, 7, 1)", "2 dimensions"]),
        ("linear", {"key_mask": (1, 7)}, ["key_mask has batch 1", "expected 2"]),
        ("linear", {"key_mask": (2, 9)}, ["key_mask has length 9", "expected 7"]),
        ("linear", {"past_state": (2, 2, 15)}, ["past_state", "(2, 2, 15)", "4 dimensions"]),
        ("linear", {"past_state": (3, 2, 3, 5)}, ["past_state has batch 3", "expected 2"]),
        ("linear", {"past_state": (2, 4, 3, 5)}, ["(2, 4, 3, 5)", "expected (B, 2, 3, 5)"]),
        ("linear", {"past_state": (2, 2, 5, 3)}, ["(2, 2, 5, 3)", "expected (B, 2, 3, 5)"]),
        ("linear", {"past_state": ("B", 2, 3, 6)}, ["'B', 2, 3, 6", "expected (B, 2, 3, 5)"]),
        ("linear", {"past_normalizer": PAST_NORMALIZER}, ["past_normalizer", "normalize=0"]),
        ("delta", {"beta": (2, 7, 2), "past_normalizer": PAST_NORMALIZER}, ["normalize=0"]),
        ("normalised", {"past_normalizer": (2, 6)}, ["past_normalizer", "(2, 6)", "3 dimensions"]),
        ("normalised", {"past_normalizer": (1, 2, 3)}, ["past_normalizer has batch 1"]),
        ("normalised", {"past_normalizer": (2, 2, 5)}, ["(2, 2, 5)", "expected (B, 2, 3)"]),
        ("bidirectional", {"past_state": PAST_STATE}, ["causal=0", "no past state"]),
        ("bidirectional", {"value": (2, 8, 10)}, ["value has length 8", "expected 7"]),
        ("bidirectional", {"query": (3, 9, 12)}, ["key has batch 2", "expected 3"]),
        ("bidirectional", {"past_normalizer": PAST_NORMALIZER}, ["causal=0", "no past state"]),
    ],
)
def test_shapes(rule: str, shapes: dict[str, tuple[Any, ...]], words: list[str]) -> None:
    attributes: dict[str, Any] = {
        "normalised": {"normalize": True},
        "bidirectional": {"causal": False, "normalize": True},
    }.get(rule, {"update_rule": rule})
    spec = LinearAttentionSpec(4, 2, **attributes)
    with pytest.raises(OpError) as error:
        spec.check(**{**SHAPES, **shapes})
    assert [w for w in words if w not in str(error.value)] == []


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ({}, AttentionSizes(2, 3, 5)),
        ({"key": (2, 7, 3)}, AttentionSizes(1, 3, 5)),
        (
            {"query": ("B", "T", 12), "decay": (None, 7, 6)},
            AttentionSizes(2, 3, 5, decay_per_channel=True),
        ),
        (
            {"beta": (2, 7, 1), "key_mask": ("B", None)},
            AttentionSizes(2, 3, 5, beta_per_head=False),
        ),
        ({"past_state": (None, 2, "d", 5)}, AttentionSizes(2, 3, 5)),
        ({"query": (2, 0, 12), "key": (2, 0, 6), "value": (2, 0, 10)}, None),
    ],
)
def test_what_is_not_known_is_accepted(
    shapes: dict[str, tuple[Any, ...]], sizes: AttentionSizes | None
) -> None:
    if sizes is None:
        shapes = {**shapes, "decay": (2, 0, 2), "beta": (2, 0, 2)}
    found = LinearAttentionSpec(4, 2, "gated_delta").check(**{**GATED, **shapes})
    assert found == (sizes or AttentionSizes(2, 3, 5))


def test_cross_attention_has_two_lengths() -> None:
    shapes = {**SHAPES, "query": (2, 9, 12), "key_mask": (2, 7)}
    assert LinearAttentionSpec(4, 2, causal=False).check(**shapes) == AttentionSizes(2, 3, 5)


def test_one_channel_per_head_is_decay_per_head() -> None:
    """With d_k = 1 both readings of decay coincide."""
    shapes = {"query": (1, 2, 4), "key": (1, 2, 2), "value": (1, 2, 2), "decay": (1, 2, 2)}
    assert not LinearAttentionSpec(4, 2, "gated").check(**shapes).decay_per_channel


@pytest.mark.parametrize(
    ("activation", "shapes", "words"),
    [
        ("gelu", {}, ["'gelu'", "none, silu, swish"]),
        ("none", {"input": (2, 4)}, ["input", "(2, 4)", "3 dimensions"]),
        ("none", {"weight": (4, 3)}, ["weight", "(4, 3)", "3 dimensions"]),
        ("none", {"weight": (5, 1, 3)}, ["weight has channels 5", "expected 4"]),
        ("none", {"weight": (4, 2, 3)}, ["weight has middle dimension 2", "expected 1"]),
        ("none", {"weight": (4, 1, "k")}, ["kernel size k", "at least 1"]),
        ("none", {"weight": (4, 1, None)}, ["kernel size None", "at least 1"]),
        ("none", {"weight": (4, 1, 0)}, ["kernel size 0", "at least 1"]),
        ("silu", {"bias": (4, 1)}, ["bias", "(4, 1)", "1 dimensions"]),
        ("silu", {"bias": (3,)}, ["bias has channels 3", "expected 4"]),
        ("silu", {"past_state": (2, 4)}, ["past_state", "(2, 4)", "3 dimensions"]),
        ("silu", {"past_state": (1, 4, 2)}, ["past_state has batch 1", "expected 2"]),
        ("silu", {"past_state": (2, 5, 2)}, ["past_state has channels 5", "expected 4"]),
        ("silu", {"past_state": (2, 4, 3)}, ["past_state has length 3", "expected 2"]),
    ],
)
def test_causal_conv(activation: str, shapes: dict[str, tuple[Any, ...]], words: list[str]) -> None:
    with pytest.raises(OpError) as error:
        causal_conv.check(activation, **{"input": (2, 4, 9), "weight": (4, 1, 3), **shapes})
    assert [w for w in words if w not in str(error.value)] == []


def test_causal_conv_accepts_symbols() -> None:
    assert causal_conv.check("silu", ("B", 4, "T"), (4, 1, 3), (4,), ("B", None, 2)) == 3


@pytest.mark.parametrize(
    ("attributes", "shape", "words"),
    [
        ({"kind": "rleu", "num_heads": 2}, (1, 2, 8), ["'rleu'", "relu"]),
        ({"num_heads": 2}, (1, 2, 8), ["kind None", "relu"]),
        ({"kind": "relu"}, (1, 2, 8), ["num_heads None", "at least 1"]),
        ({"kind": "relu", "num_heads": 0}, (1, 2, 8), ["num_heads 0", "at least 1"]),
        ({"kind": "relu", "num_heads": 3}, (1, 2, 8), ["x", "width 8", "3 heads"]),
        ({"kind": "relu", "num_heads": 2}, (1, 8), ["x", "(1, 8)", "3 dimensions"]),
        ({"kind": "relu", "num_heads": 2}, (1, 2, None), ["x", "unknown width"]),
    ],
)
def test_feature_map(attributes: dict[str, Any], shape: tuple[Any, ...], words: list[str]) -> None:
    assert "relu" in feature_maps.kinds()
    with pytest.raises(OpError) as error:
        feature_map.OP.shapes(Node("FeatureMap", attributes, ("x",), {"x": shape}))
    assert [w for w in words if w not in str(error.value)] == []


def test_nodes_that_do_not_fit_the_op() -> None:
    shapes = dict.fromkeys("abc", (1, 2, 4))
    node = helper.make_node("LinearAttention", list("abc" * 5), ["o"], name="la")
    with pytest.raises(OpError, match=r"LinearAttention 'la' has 15 inputs; expected 13"):
        read_node(node, OP, shapes)
    node = helper.make_node("LinearAttention", list("abx"), ["o"], name="la")
    with pytest.raises(OpError, match=r"'la': the shape of its input value is unknown"):
        read_node(node, OP, shapes)


def test_view_reads_a_node() -> None:
    attributes = {"q_num_heads": 2, "kv_num_heads": 2, "normalize": 1}
    node = helper.make_node("LinearAttention", list("abc"), ["o"], **attributes)
    seen = read_node(node, OP, dict.fromkeys("abc", (1, "T", 4)))
    assert seen.inputs[:4] == ("query", "key", "value", "")
    assert len(seen.inputs) == len(OP.schema.inputs)
    assert view(seen) == (LinearAttentionSpec(2, 2, normalize=True), AttentionSizes(2, 2, 2))


def test_attaching_reports_the_first_wrong_node() -> None:
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, "T", w))
        for n, w in (("q", 4), ("k", 4), ("v", 5), ("o", 5))
    ]
    node = helper.make_node(
        "LinearAttention", list("qkv"), ["o"], domain="linexport", q_num_heads=2, kv_num_heads=2
    )
    model = one_op_model([node], infos[:3], infos[3:])
    with pytest.raises(OpError, match="value has width 5; expected a multiple of its 2 heads"):
        attach_functions(model)
    assert not model.functions


def test_all_ops_are_found() -> None:
    assert set(all_ops()) >= {"LinearAttention", "CausalConvWithState", "FeatureMap"}


def test_registering_schemas_leaves_onnx_usable() -> None:
    """onnx.reference, which torch.onnx.export imports, refuses one name in two domains."""
    code = (
        "from linexport.plugins.ops.registry import register_schemas; register_schemas(); "
        "register_schemas(); import onnx.reference"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
