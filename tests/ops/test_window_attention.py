"""WindowAttention: body and PyTorch are the definition, in one call and in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from linexport.errors import OpError
from linexport.models import torch_ops
from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.plugins.ops.window_attention import OP, WindowSpec, window_attention
from tests.support.near_far import heads_first, near_far

STATES = OP.input_names[3:9]


def values(spec: WindowSpec, batch: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Query, key, value and key_mask of heads of 4 and values of 3."""
    random = np.random.default_rng(seed)
    widths = {"query": 4 * spec.q_num_heads, "key": 4 * spec.kv_num_heads}
    widths["value"] = 3 * spec.kv_num_heads
    found = {n: random.normal(size=(batch, length, w)) for n, w in widths.items()}
    return {**found, "key_mask": random.random((batch, length)) < 0.7}


def session(spec: WindowSpec, names: list[str], dtype: int) -> onnxruntime.InferenceSession:
    """One node with sizes that are not known before it runs."""
    register_schemas()
    outputs = list(OP.output_names)
    inputs = [name if name in names else "" for name in OP.input_names]
    node = helper.make_node(OP.name, inputs, outputs, domain="linexport", **vars(spec))
    keys, rows = 4 * spec.kv_num_heads, 3 * spec.kv_num_heads
    shapes: dict[str, list[Any]] = {
        "query": ["B", "T", 4 * spec.q_num_heads],
        "key": ["B", "T", keys],
        "value": ["B", "T", rows],
        "past_key": ["B", spec.window, keys],
        "past_value": ["B", spec.window, rows],
        "past_seen": ["B", spec.window],
        "past_sink_key": ["B", spec.sinks, keys],
        "past_sink_value": ["B", spec.sinks, rows],
        "past_left": ["B", 1],
        "key_mask": ["B", "T"],
    }
    wide = ("past_seen", "past_left")
    typed = [
        helper.make_tensor_value_info(
            n, onnx.TensorProto.BOOL if n == "key_mask" else 1 if n in wide else dtype, shapes[n]
        )
        for n in names
    ]
    made = helper.make_graph([node], "g", typed, [onnx.ValueInfoProto(name=n) for n in outputs])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    attach_functions(model)
    return onnxruntime.InferenceSession(model.SerializeToString())


def narrow(x: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    return x if x.dtype == bool else x.astype(dtype)


SPECS = st.builds(
    WindowSpec,
    q_num_heads=st.sampled_from([2, 4]),
    kv_num_heads=st.sampled_from([1, 2]),
    window=st.sampled_from([1, 2, 3, 7, 33, 40]),
    sinks=st.sampled_from([0, 1, 3]),
    scale=st.sampled_from([1.0, 0.5]),
)


@settings(max_examples=30, deadline=None)
@given(SPECS, st.integers(1, 3), st.integers(1, 90), st.booleans(), st.integers(0, 9))
def test_body_and_pytorch_are_the_definition(
    spec: WindowSpec, batch: int, length: int, masked: bool, seed: int
) -> None:
    given_ = values(spec, batch, length, seed)
    if not masked:
        del given_["key_mask"]
    expected = window_attention(spec, **given_)
    tensors = {n: torch.from_numpy(x) for n, x in given_.items()}
    eager = torch_ops.call(OP, **{**dict.fromkeys(OP.input_names), **tensors}, **vars(spec))
    fed = {n: narrow(x) for n, x in given_.items()}
    body = session(spec, list(fed), 1).run(None, fed)
    for name, want, torch_one, onnx_one in zip(OP.output_names, expected, eager, body, strict=True):
        assert want.shape == torch_one.shape == onnx_one.shape, name
        np.testing.assert_allclose(torch_one.numpy(), want, rtol=1e-9, atol=1e-10, err_msg=name)
        np.testing.assert_allclose(onnx_one, want, rtol=2e-5, atol=2e-6, err_msg=name)


@settings(max_examples=15, deadline=None)
@given(SPECS, st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 9))
def test_pieces_give_what_the_whole_gives(spec: WindowSpec, pieces: list[int], seed: int) -> None:
    given_ = values(spec, 2, sum(pieces), seed)
    whole = window_attention(spec, **given_)
    names = [*given_, *STATES[: 6 if spec.sinks else 3]]
    run = session(spec, names, 1)
    zeros = window_attention(spec, **{n: x[:, :0] for n, x in given_.items()})
    states = {n: narrow(x) for n, x in zip(STATES, zeros[6:], strict=True) if n in names}
    parts, start = list[list[np.ndarray]](), 0
    for piece in pieces:
        fed = {n: narrow(x[:, start : start + piece]) for n, x in given_.items()}
        found = run.run(None, {**fed, **states})
        states = {n: x for n, x in zip(STATES, found[6:], strict=True) if n in names}
        parts.append(found[:6])
        start += piece
    for at, name in enumerate(OP.output_names[:6]):
        joined = np.concatenate([part[at] for part in parts], 1)
        np.testing.assert_allclose(joined, whole[at], rtol=2e-5, atol=2e-6, err_msg=name)
    for name, want in zip(STATES, whole[6:], strict=True):
        if name in names:
            np.testing.assert_allclose(states[name], want, rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_definition_is_softmax_over_the_pairs_of_a_window() -> None:
    spec = WindowSpec(4, 2, 5, 2, 0.5)
    given_ = values(spec, 2, 23, 0)
    q, k, v = (
        heads_first(torch.from_numpy(given_[n]), h)
        for n, h in (("query", 4), ("key", 2), ("value", 2))
    )
    none = (np.zeros_like(q), np.zeros_like(k))
    expected = near_far(q, k, v, none, 5, 2, key_mask=given_["key_mask"])
    got = heads_first(torch.from_numpy(window_attention(spec, **given_)[0]), 4)
    seen = given_["key_mask"].cumsum(1) > 0
    np.testing.assert_allclose(got[:, :, 8:], expected[:, :, 8:], atol=1e-12)
    assert seen[:, 8:].all()


def test_large_scores_do_not_overflow_and_a_query_without_keys_gives_zeros() -> None:
    spec = WindowSpec(1, 1, 2)
    x = np.full((1, 3, 4), 60.0)
    mask = np.array([[False, True, True]])
    inputs = {"query": x, "key": x, "value": x[..., :3], "key_mask": mask}
    fed = {n: narrow(v) for n, v in inputs.items()}
    output, maximum, total, *_ = session(spec, list(fed), 1).run(None, fed)
    np.testing.assert_allclose(output[0], [[0] * 3, [60] * 3, [60] * 3])
    np.testing.assert_allclose(total[0, :, 0], [0, 1, 2])
    np.testing.assert_allclose(maximum[0, 1:, 0], 4 * 60.0**2)


def test_half_precision_is_computed_in_float32() -> None:
    spec = WindowSpec(2, 1, 8, 1, 0.5)
    given_ = {n: narrow(x, np.float16) for n, x in values(spec, 1, 40, 0).items()}
    expected = window_attention(spec, **given_)
    found = session(spec, list(given_), onnx.TensorProto.FLOAT16).run(None, given_)
    assert [x.dtype for x in found[:4]] == [np.float16, np.float32, np.float32, np.float16]
    np.testing.assert_allclose(found[0], expected[0], atol=2e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"window": 0}, "window 0"), ({"sinks": -1}, "sinks -1"), ({"kv_num_heads": 3}, "share 3")],
)
def test_attributes_without_a_meaning_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(OpError, match=words):
        WindowSpec(**{"q_num_heads": 4, "kv_num_heads": 2, "window": 3, **change})
