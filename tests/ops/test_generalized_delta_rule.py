"""GeneralizedDeltaRule: its oracle, refusals, ONNX body, PyTorch twin, and states in a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import linexport
from linexport import models
from linexport.errors import OpError
from linexport.models.functional import generalized_delta_rule as in_pytorch
from linexport.plugins.ops.generalized_delta_rule import (
    INPUTS,
    OP,
    DeltaRuleSizes,
    by_blocks,
    check,
    generalized_delta_rule,
    view,
)
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from linexport.plugins.ops.op import Lowering, Node
from linexport.plugins.ops.registry import attach_functions
from tests.support import runtimes
from tests.support.comparison import assert_close
from tests.support.layouts import ELEMENT, one_op_model

HEADS, D_K, D_V = 2, 4, 3
Arrays = dict[str, np.ndarray]


def fixed(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def inputs(seed: int, batch: int, length: int, past: bool = False, masked: bool = False) -> Arrays:
    """Random values as RWKV-7 has them: a of norm 1, b its opposite times a rate in 0 ... 1."""
    rng = np.random.default_rng(seed)
    x = {n: rng.normal(size=(batch, length, HEADS * D_K)) for n in ("query", "key", "decay")}
    x["value"] = rng.normal(size=(batch, length, HEADS * D_V))
    x["decay"] = -np.abs(x["decay"])
    a = rng.normal(size=(batch, length, HEADS, D_K))
    x["a"] = (a / np.linalg.norm(a, axis=-1, keepdims=True)).reshape(x["key"].shape)
    x["b"] = -x["a"] * rng.uniform(0, 1, (batch, length, HEADS * D_K))
    if past:
        x["past_state"] = rng.normal(size=(batch, HEADS, D_K, D_V))
    x = {n: v.astype(np.float32) for n, v in x.items()}
    if masked:
        x["key_mask"] = rng.uniform(size=(batch, length)) < 0.7
    return x


def wide(x: Arrays) -> Arrays:
    return {n: v if v.dtype == bool else v.astype(np.float64) for n, v in x.items()}


def oracle(x: Arrays, scale: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    return generalized_delta_rule(HEADS, scale, **wide(x))


def head(x: np.ndarray, batch: int, index: int) -> np.ndarray:
    width = x.shape[2] // HEADS
    return x[batch, :, index * width : (index + 1) * width]


# The oracle, against forms that share none of its code -------------------------------------------


@pytest.mark.parametrize(
    ("past", "masked"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_oracle_equals_products_of_transition_matrices(past: bool, masked: bool) -> None:
    x = wide(inputs(1, 2, 7, past, masked))
    output, state = oracle(x)
    eye = np.eye(D_K)
    for batch, h in np.ndindex(2, HEADS):
        q, k, v, g, a, b = (head(x[n], batch, h) for n in INPUTS[:6])
        keep = x["key_mask"][batch] if masked else np.ones(7, bool)
        steps = [np.diag(np.exp(g[t])) + np.outer(b[t], a[t]) if keep[t] else eye for t in range(7)]
        for t in range(7):
            S, carried = np.zeros((D_K, D_V)), eye
            for s in range(t, -1, -1):
                S += keep[s] * carried @ np.outer(k[s], v[s])
                carried = carried @ steps[s]
            S += carried @ (x["past_state"][batch, h] if past else 0 * S)
            np.testing.assert_allclose(head(output, batch, h)[t], 0.5 * q[t] @ S, rtol=1e-11)
        np.testing.assert_allclose(state[batch, h], S, rtol=1e-11)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_every_other_rule_is_a_case_of_it(rule: str) -> None:
    x = wide(inputs(2, 2, 9, past=True, masked=True))
    spec = LinearAttentionSpec(HEADS, HEADS, rule, scale=0.5)
    beta = np.random.default_rng(0).uniform(0, 2, (2, 9, HEADS))
    gates = {"decay": x["decay"]} if spec.has_decay else {}
    gates |= {"beta": beta} if spec.has_beta else {}
    shared = {n: x[n] for n in ("query", "key", "value", "past_state", "key_mask")}
    want = linear_attention(spec, **shared, **gates)
    decay = gates.get("decay", np.zeros_like(x["key"]))
    step = np.repeat(beta, D_K, axis=2) if spec.has_beta else np.zeros_like(x["key"])
    # The written key carries beta once for the value and once for what it takes away.
    key = x["key"] * (step if spec.has_beta else 1.0)
    got = generalized_delta_rule(
        HEADS,
        0.5,
        **{**shared, "key": key, "decay": decay, "a": np.exp(decay) * x["key"]},
        b=-step * x["key"],
    )
    for found, expected in zip(got, want, strict=False):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_gated_deltanet_2_is_a_case_of_it() -> None:
    """S_t = (I - k_t (e_t * k_t)^T) diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T, multiplied out."""
    x, rng = wide(inputs(3, 1, 6)), np.random.default_rng(4)
    erase, write = rng.uniform(size=x["key"].shape), rng.uniform(size=x["value"].shape)
    case = {**x, "a": np.exp(x["decay"]) * erase * x["key"], "b": -x["key"]}
    case["value"] = write * x["value"]
    output, state = oracle(case)
    for h in range(HEADS):
        q, k, v, g = (head(x[n], 0, h) for n in INPUTS[:4])
        e, w = head(erase, 0, h), head(write, 0, h)
        S = np.zeros((D_K, D_V))
        for t in range(6):
            erased = np.eye(D_K) - np.outer(k[t], e[t] * k[t])
            S = erased @ np.diag(np.exp(g[t])) @ S + np.outer(k[t], w[t] * v[t])
            np.testing.assert_allclose(head(output, 0, h)[t], 0.5 * q[t] @ S, rtol=1e-11)
        np.testing.assert_allclose(state[0, h], S, rtol=1e-11)


@pytest.mark.smoke
def test_two_tokens_by_hand() -> None:
    # d_k = 2, d_v = 1: S_1 = k_1 v_1 = (2, 0). Token 2 halves it, reads a.S_1 = 2 and writes
    # b times that, (0, -2), and k_2 v_2 = (3, 3): S_2 = (1 + 0 + 3, 0 - 2 + 3).
    pair = [np.array([[[1.0, 1.0], [1.0, 1.0]]]), np.array([[[1.0, 0.0], [1.0, 1.0]]])]
    value, decay = np.array([[[2.0], [3.0]]]), np.full((1, 2, 2), np.log(0.5))
    a, b = np.array([[[9.0, 9.0], [1.0, 5.0]]]), np.array([[[7.0, 7.0], [0.0, -1.0]]])
    output, state = generalized_delta_rule(1, 2.0, *pair, value, decay, a, b)
    assert output.ravel().tolist() == [4.0, 10.0]
    assert state.ravel().tolist() == [4.0, 1.0]


# Refusals ----------------------------------------------------------------------------------------

SHAPES: dict[str, Any] = {
    **dict.fromkeys(("query", "key", "decay", "a", "b"), (2, 7, 8)),
    "value": (2, 7, 6),
}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"query": (2, 7)}, ["query", "3 dimensions"]),
        ({"query": (2, 7, 9)}, ["query has width 9", "2 heads"]),
        ({"key": (2, 7, 6)}, ["key has width 6", "expected 8"]),
        ({"decay": (2, 7, 2)}, ["decay has width 2", "expected 8"]),
        ({"a": (2, 7, None)}, ["a has an unknown width"]),
        ({"b": (2, 6, 8)}, ["b has length 6", "expected 7"]),
        ({"value": (1, 7, 6)}, ["value has batch 1", "expected 2"]),
        ({"value": (2, 7, 7)}, ["value has width 7", "2 heads"]),
        ({"key_mask": (2, 7, 1)}, ["key_mask", "2 dimensions"]),
        ({"key_mask": (2, 5)}, ["key_mask has length 5"]),
        ({"past_state": (2, 8, 3)}, ["past_state", "4 dimensions"]),
        ({"past_state": (2, 2, 3, 4)}, ["past_state has key width 3", "expected 4"]),
        ({"past_state": (3, 2, 4, 3)}, ["past_state has batch 3", "expected 2"]),
    ],
)
def test_wrong_shapes_are_refused(shapes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OpError) as error:
        check(2, **{**SHAPES, **shapes})
    assert [w for w in words if w not in str(error.value)] == []


def test_wrong_nodes_are_refused() -> None:
    with pytest.raises(OpError, match="num_heads is 0"):
        check(0, **SHAPES)
    with pytest.raises(OpError, match="lacks the attribute num_heads"):
        view(Node(OP.name, {}, INPUTS, SHAPES))
    without = {n: s for n, s in SHAPES.items() if n != "decay"}
    with pytest.raises(OpError, match="lacks the input decay"):
        OP.shapes(Node(OP.name, {"num_heads": 2}, INPUTS, without))
    assert view(Node(OP.name, {"num_heads": 2}, INPUTS, SHAPES)) == DeltaRuleSizes(2, 4, 3)


# The body ----------------------------------------------------------------------------------------


def model(
    x: Arrays, dtype: str = "float32", opset: int = 18, lowering: Lowering = OP.portable
) -> onnx.ModelProto:
    """One node with the inputs of ``x``, dynamic batch and length; float32 outside."""
    narrow, floating = ELEMENT[dtype][1], TensorProto.FLOAT
    nodes, feeds, infos, names = [], [], [], []
    for name in INPUTS:
        if name not in x:
            names.append("")
            continue
        fixed_sizes = x[name].shape[1:] if name == "past_state" else x[name].shape[2:]
        shape = ("B", *fixed_sizes) if name == "past_state" else ("B", "T", *fixed_sizes)
        kind = TensorProto.BOOL if name == "key_mask" else floating
        feeds.append(helper.make_tensor_value_info(name, kind, shape))
        names.append(name)
        if name in INPUTS[:6] and narrow != floating:
            names[-1] = f"{name}_cast"
            nodes.append(helper.make_node("Cast", [name], [names[-1]], to=narrow))
            infos.append(helper.make_tensor_value_info(names[-1], narrow, shape))
    while not names[-1]:
        names.pop()
    results = ["narrow_output", "present_state"]
    nodes += [
        helper.make_node(OP.name, names, results, domain="linexport", num_heads=HEADS, scale=0.5),
        helper.make_node("Cast", results[:1], ["output"], to=floating),
    ]
    shapes = {"output": ("B", "T", HEADS * D_V), "present_state": ("B", HEADS, D_K, D_V)}
    ends = [helper.make_tensor_value_info(n, floating, s) for n, s in shapes.items()]
    made: onnx.ModelProto = one_op_model(nodes, feeds, ends, infos)
    made.opset_import[0].version = opset
    attach_functions(made, lambda *_: lowering)
    onnx.checker.check_model(made, full_check=True)
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("runtime", ["on_onnxruntime", "on_reference"])
@fixed(15)
@given(
    past=st.booleans(),
    masked=st.booleans(),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    opset=st.sampled_from([18, 22, 26]),
    lowering=st.sampled_from([OP.portable, by_blocks]),
    seed=st.integers(0, 9),
)
def test_body_equals_oracle(
    runtime: str,
    past: bool,
    masked: bool,
    lengths: list[int],
    batch: int,
    opset: int,
    lowering: Lowering,
    seed: int,
) -> None:
    example = inputs(seed, 1, 1, past, masked)
    run = getattr(runtimes, runtime)(model(example, opset=opset, lowering=lowering))
    for length in [*lengths, 1, 0]:
        x = inputs(seed, batch, length, past, masked)
        want = oracle(x)
        # What rounding is relative to: the largest value a state has held.
        held = [want[1], x["value"], x.get("past_state", want[1])]
        largest = max(1.0, *(float(np.abs(v).max(initial=0)) for v in held))
        scales = [np.full_like(w, largest * D_K) for w in want]
        assert_close(run(x), want, scales, 2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_the_output_only(dtype: str) -> None:
    x = inputs(5, 2, 40, past=True)
    narrow = {
        n: v if n == "past_state" else v.astype(ELEMENT[dtype][0]).astype(np.float32)
        for n, v in x.items()
    }
    output, state = runtimes.on_onnxruntime(model(narrow, dtype))(narrow)
    want = oracle(narrow)
    np.testing.assert_allclose(state, want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        output, want[0], rtol={"float16": 1e-3, "bfloat16": 8e-3}[dtype], atol=1e-5
    )


DECAYS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "none": lambda rng, shape: np.zeros(shape),
    "rwkv7": lambda rng, shape: -np.exp(-0.5) * rng.uniform(size=shape),
    "forgets all": lambda rng, shape: np.full(shape, -np.inf),
    "1e-30": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.5, -69.0, 0.0),
    "mixed": lambda rng, shape: -np.exp(3 * rng.normal(size=shape)),
    "zeros among ones": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.2, -np.inf, 0.0),
    "grows": lambda rng, shape: 0.02 * rng.normal(size=shape),
}


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("lowering", [OP.portable, by_blocks])
def test_decays_of_any_size(kind: str, lowering: Lowering) -> None:
    """At least as exact as 50 roundings of the largest value that a state has held.

    Lengths are around chunks and around blocks of them.
    """
    run = runtimes.on_onnxruntime(model(inputs(0, 1, 1, True, True), lowering=lowering))
    for length in (9, 16, 17, 128, 129, 300):
        x = inputs(length, 2, length, True, True)
        x["decay"] = DECAYS[kind](np.random.default_rng(length), x["decay"].shape)
        x["decay"] = x["decay"].astype(np.float32)
        want = oracle(x)
        held = max(float(np.abs(v).max()) for v in (*want, x["value"], x["past_state"]))
        assert_close(run(x), want, [np.full_like(w, held) for w in want], 3e-6)


def test_strong_decays_leave_nothing_of_large_states() -> None:
    """What was forgotten, 1e30 here, is not in what comes behind it in a chunk."""
    x = inputs(3, 1, 24, past=True)
    x["past_state"] *= np.float32(1e30)
    x["value"][:, :5] *= np.float32(1e30)
    x["decay"][:, 5], x["a"][:, 5] = -np.inf, 0.0
    late = {n: v[:, 6:] for n, v in x.items() if n != "past_state"}
    fifth = {n: v[:, 5:6] for n, v in x.items() if n != "past_state"}
    state = oracle(fifth)[1]
    want, end = oracle({**late, "past_state": state})
    output, present = runtimes.on_onnxruntime(model(x))(x)
    np.testing.assert_allclose(output[:, 6:], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(present, end, rtol=1e-4, atol=1e-5)


def test_long_sequences_of_reflections_keep_their_norm() -> None:
    """b = -2 a, a of norm 1, never forgets: errors of 2,000 tokens add up, and no more."""
    x = inputs(4, 1, 2000, past=True)
    x["decay"], x["b"] = np.zeros_like(x["decay"]), -2 * x["a"]
    x["key"] *= np.float32(0.1)
    want = oracle(x)
    got = runtimes.on_onnxruntime(model(x))(x)
    largest = [np.full_like(w, np.abs(want[0]).max()) for w in want]
    assert_close(got, want, largest, 1e-5)


def test_a_sequence_in_pieces_is_the_sequence() -> None:
    x = inputs(6, 2, 33, past=True, masked=True)
    run = runtimes.on_onnxruntime(model(x))
    whole, state = run(x)
    pieces, past = [], x["past_state"]
    for part in (slice(0, 20), slice(20, 20), slice(20, 21), slice(21, 33)):
        piece = {n: v[:, part] for n, v in x.items() if n != "past_state"}
        output, past = run({**piece, "past_state": past})
        pieces.append(output)
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(past, state, rtol=1e-5, atol=1e-6)


# The PyTorch twin --------------------------------------------------------------------------------


def tensors(x: Arrays, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    found = {n: torch.from_numpy(v.copy()) for n, v in x.items()}
    return {n: v if v.dtype == torch.bool else v.to(dtype) for n, v in found.items()}


@fixed(30)
@given(
    past=st.booleans(),
    masked=st.booleans(),
    length=st.integers(0, 40),
    batch=st.integers(1, 3),
)
def test_twin_equals_oracle(past: bool, masked: bool, length: int, batch: int) -> None:
    x = inputs(length, batch, length, past, masked)
    got = in_pytorch(**tensors(x), num_heads=HEADS, scale=0.5)
    for found, expected in zip(got, oracle(x), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-11, atol=1e-13)


def test_twin_has_gradients() -> None:
    x = tensors(inputs(7, 1, 3, past=True, masked=True))
    names = [n for n in INPUTS if n != "key_mask"]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given_ = dict(zip(names, values, strict=True))
        return in_pytorch(**given_, key_mask=x["key_mask"], num_heads=HEADS, scale=0.5)

    assert torch.autograd.gradcheck(run, [x[n].requires_grad_() for n in names])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twin_computes_halves_in_float32(dtype: torch.dtype) -> None:
    x = tensors(inputs(8, 2, 20), dtype)
    output, state = in_pytorch(**x, num_heads=HEADS)
    assert (output.dtype, state.dtype) == (dtype, torch.float32)
    want = generalized_delta_rule(HEADS, 1.0, **{n: v.double().numpy() for n, v in x.items()})
    np.testing.assert_allclose(state.numpy(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("past", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.float16)]
)
def test_operator(past: bool, dtype: torch.dtype) -> None:
    x = tensors(inputs(9, 2, 5, past, masked=True), dtype)
    call = torch.ops.linexport.generalized_delta_rule.default
    arguments, keywords = tuple(x.get(n) for n in INPUTS), {"num_heads": HEADS, "scale": 0.5}
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(call, arguments, keywords, test_utils=checks)
    want = in_pytorch(**x, **keywords)
    for got, expected in zip(call(*arguments, **keywords), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Converted ---------------------------------------------------------------------------------------


def test_it_converts_and_streams(tmp_path: Path) -> None:
    place = tmp_path / "artifact"
    manifest = linexport.convert(
        "generalized_delta_layer:build", place, bench=False, threads=1, dims=["seq=1:16:64"]
    )
    assert manifest.status == "ok" and manifest.streaming.passed
    assert manifest.fused == {"GeneralizedDeltaRule": 1}
    assert [c.lowering for c in manifest.lowerings] == ["by_blocks"]
    assert [s.shape[1:] for s in manifest.states] == [(2, 4, 4)]
    x = np.random.default_rng(0).normal(size=(2, 40, 8)).astype(np.float32)
    artifact = linexport.load(place, threads=1)
    stream = artifact.stream()
    pieces = [stream.step(x[:, p])["output"] for p in (slice(0, 31), slice(31, 32), slice(32, 40))]
    np.testing.assert_allclose(np.concatenate(pieces, 1), artifact.run(x)["output"], atol=1e-5)


def test_a_model_with_learned_positions_keeps_its_state(tmp_path: Path) -> None:
    place = tmp_path / "artifact"
    manifest = linexport.convert(
        "generalized_delta_layer:positioned", place, bench=False, threads=1, dims=["seq=1:16:64"]
    )
    assert manifest.status == "ok" and manifest.streaming and manifest.streaming.passed
    assert [s.op for s in manifest.states] == ["GeneralizedDeltaRule", "Positions"]


def test_importing_the_models_registers_the_operator() -> None:
    assert models and hasattr(torch.ops.linexport, "generalized_delta_rule")
