"""Logits of the last tokens alone are those of all tokens; the head is not run on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import linexport
from linexport.artifact import Artifact
from linexport.errors import UsageError
from linexport.graph.dims import DimRange
from linexport.graph.interface import input_records, tensor_records
from linexport.targets.base import Converted, OrtSession
from linexport.targets.lowering.kept_logits import with_kept_logits, with_logits_at
from linexport.targets.runtime.options import LOGITS_AT, LOGITS_FROM, LOGITS_TO_KEEP
from linexport.targets.trt.engine_form import engine_form
from linexport.targets.trt.session import places

WIDTH, VOCABULARY = 4, 7


def language_tail(
    *after: tuple[str, list[str]], product: str = "MatMul", shown: bool = False
) -> onnx.ModelProto:
    """x (B, T, W) -> x W -> each of ``after``, whose last output is the logits."""
    rng = np.random.default_rng(0)
    weights = {
        "W": rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32),
        "scale": np.array(3, np.float32),
        "bias": rng.normal(size=VOCABULARY).astype(np.float32),
    }
    steps = [(product, ["x", "W"]), *after]
    names = [f"v{i}" for i in range(len(steps) - 1)] + ["logits"]
    nodes = [
        helper.make_node(op, [names[i - 1] if n == "" else n for n in inputs], [names[i]])
        for i, (op, inputs) in enumerate(steps)
    ]
    dims = ["B", "T", VOCABULARY]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, dims)]
    if shown:
        outputs.append(helper.make_tensor_value_info("v0", TensorProto.FLOAT, dims))
    graph = helper.make_graph(
        nodes,
        "tail",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "T", WIDTH])],
        outputs,
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


TAILS = {
    "plain": language_tail(),
    "a bias": language_tail(("Add", ["", "bias"])),
    "capped": language_tail(("Div", ["", "scale"]), ("Tanh", [""]), ("Mul", ["", "scale"])),
    "scaled first": language_tail(("Mul", ["scale", ""])),
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("kept", [1, 3, 5, 9])
def test_logits_of_the_last_tokens_are_those_of_all(name: str, kept: int) -> None:
    changed = with_kept_logits(TAILS[name], "logits")
    onnx.checker.check_model(changed, full_check=True)
    session = onnxruntime.InferenceSession(changed.SerializeToString())
    x = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)
    (whole,) = session.run(None, {"x": x, LOGITS_FROM: np.array([0])})
    (original,) = onnxruntime.InferenceSession(TAILS[name].SerializeToString()).run(None, {"x": x})
    (last,) = session.run(None, {"x": x, LOGITS_FROM: np.array([-kept])})
    np.testing.assert_array_equal(whole, original)
    np.testing.assert_allclose(last, original[:, -kept:], rtol=1e-6)
    assert last.shape[1] == min(kept, 5)


@given(st.data(), st.sampled_from(sorted(TAILS)), st.integers(1, 4), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_an_engine_gives_logits_at_any_places_of_each_row(
    data: st.DataObject, name: str, rows: int, tokens: int
) -> None:
    """Rows of unequal lengths, whose last tokens are at different places, among them."""
    changed = with_logits_at(TAILS[name], "logits")
    onnx.checker.check_model(changed, full_check=True)
    kept = data.draw(st.integers(1, tokens + 1))
    numbers = st.lists(st.integers(0, tokens - 1), min_size=kept, max_size=kept)
    places = np.array([data.draw(numbers) for _ in range(rows)], np.int64)
    x = np.random.default_rng(rows).normal(size=(rows, tokens, WIDTH)).astype(np.float32)
    session = onnxruntime.InferenceSession(changed.SerializeToString())
    (found,) = session.run(None, {"x": x, LOGITS_AT: places})
    weights = {t.name: numpy_helper.to_array(t) for t in TAILS[name].graph.initializer}
    hidden = np.stack([row[at] for row, at in zip(x, places, strict=True)]).astype(np.float64)
    z = hidden @ weights["W"].astype(np.float64)
    expected = {
        "plain": z,
        "a bias": z + weights["bias"],
        "capped": 3 * np.tanh(z / 3),
        "scaled first": 3 * z,
    }[name]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert changed.graph.output[0].type.tensor_type.shape.dim[1].dim_param == LOGITS_TO_KEEP


@pytest.mark.parametrize(
    "model",
    [
        language_tail(("Softmax", [""])),  # over the vocabulary here, but it may be over tokens
        language_tail(("Add", ["", "x"])),
        language_tail(("Tanh", [""]), shown=True),
        language_tail(product="Add"),
    ],
    ids=["another operator", "another value of tokens", "read elsewhere", "no product"],
)
def test_what_may_need_other_tokens_is_left_alone(model: onnx.ModelProto) -> None:
    assert with_kept_logits(model, "logits") is model
    assert with_logits_at(model, "logits") is model


@pytest.mark.parametrize("change", [with_kept_logits, with_logits_at])
def test_a_model_with_an_input_of_that_name_is_left_alone(
    change: Callable[[onnx.ModelProto, str], onnx.ModelProto],
) -> None:
    model = change(TAILS["plain"], "logits")
    assert model is not TAILS["plain"] and change(model, "logits") is model


@pytest.mark.parametrize(
    ("words", "batch", "kept"), [(248_320, 8, 33), (248_320, 1, 270), (32_000, 8, 262), (7, 8, 999)]
)
def test_the_room_for_logits_says_of_how_many_tokens_they_are(
    words: int, batch: int, kept: int
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(TAILS["plain"])
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = words
    dims = {"B": DimRange(1, 1, batch, batch=True), "T": DimRange(1, 16, 999)}
    tensors = input_records(model.graph.input, {}), tensor_records(model.graph.output)
    converted = Converted(Path("model.onnx"), dims, *tensors, (), logits="logits")
    form = engine_form(model, converted)
    assert form.logits == "logits" and len(form.profiles) == 1
    assert form.profiles[0].dims[LOGITS_TO_KEEP] == (1, 1, kept)
    assert form.profiles[0].shapes(["B", LOGITS_TO_KEEP])[2] == [batch, kept]
    other = engine_form(model, replace(converted, logits=None))
    assert other.model is model and other.logits is None
    assert LOGITS_TO_KEEP not in other.profiles[0].dims


@pytest.mark.parametrize(
    ("tokens", "kept", "most", "expected"),
    [(5, 0, 9, [range(5)]), (5, 2, 9, [range(3, 5)]), (5, 9, 2, [(0, 1), (2, 3), (4,)])],
)
def test_places_of_the_last_tokens_are_cut_into_runs(
    tokens: int, kept: int, most: int, expected: list[Iterable[int]]
) -> None:
    found = places((2, tokens), kept, most)
    assert [part.tolist() for part in found] == [[[*part]] * 2 for part in expected]


def test_an_artifact_gives_the_logits_that_are_read(model: Artifact) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (2, 40))
    whole = model.run(ids)["output"]
    for kept in (1, 7, 40, 99):
        np.testing.assert_allclose(
            model.run(ids, logits_to_keep=kept)["output"], whole[:, -kept:], rtol=1e-5, atol=1e-5
        )
    stream = model.stream(history=20)
    stream.step(ids[:, :30], logits_to_keep=2)
    stream.rewind(5)  # the tokens from 20 on are computed again in the next step
    found = stream.step(ids[:, 25:], logits_to_keep=3)["output"]
    np.testing.assert_allclose(found, whole[:, -3:], rtol=1e-4, atol=1e-4)


def test_the_head_is_not_run_on_other_tokens(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    """By the shapes that ONNX Runtime's profile has of its products."""
    path = converted("language_model") / "model.onnx"
    session = OrtSession(path, logits="output", profile=tmp_path)
    artifact = linexport.load(converted("language_model"))
    feeds = artifact.feeds(np.zeros((1, 33), np.int64))
    assert session.keeps_logits
    session.run({**feeds, LOGITS_TO_KEEP: np.array([1])})
    profile = Path(session.inner.end_profiling()).read_text()
    assert '"float":[1,1,256]' in profile and '"float":[1,33,256]' not in profile


@pytest.mark.parametrize("kept", [-1, -5])
def test_a_negative_number_is_refused_before_the_state_goes_on(model: Artifact, kept: int) -> None:
    stream = model.stream()
    with pytest.raises(UsageError, match="expected 0"):
        stream.step(np.zeros((1, 3), np.int64), logits_to_keep=kept)
    with pytest.raises(UsageError, match="expected 0"):
        model.run(np.zeros((1, 3), np.int64), logits_to_keep=kept)
    assert not stream.state().arrays


def test_other_models_have_no_logits_to_keep(small: Artifact) -> None:
    with pytest.raises(UsageError, match="not a language model"):
        small.run(np.zeros((1, 3, 8), np.float32), logits_to_keep=1)


def test_sessions_of_a_pool_read_different_numbers_of_logits(model: Artifact) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, (1, 70)) for _ in range(4)]
    found: dict[Any, list[np.ndarray]] = {}
    kept = [1, 0, 3, 1]
    with model.pool(slots=4, chunk=32) as pool:
        sessions = [pool.open() for _ in prompts]
        for session, ids, count in zip(sessions, prompts, kept, strict=True):
            session.push(ids, logits_to_keep=count)
        while any(s.queued for s in pool):
            for session, outcome in pool.advance().items():
                found.setdefault(session, []).append(outcome["output"])
        for session, ids, count in zip(sessions, prompts, kept, strict=True):
            whole = model.run(ids)["output"]
            last = found[session][-1]
            read = last[:, -count:] if count else np.concatenate(found[session], 1)
            assert count == 0 or last.shape[1] == min(count, 70 % 32)
            expected = whole[:, -count:] if count else whole
            np.testing.assert_allclose(read, expected, rtol=1e-4, atol=1e-4)
