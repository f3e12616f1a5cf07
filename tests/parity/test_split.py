"""A language model compared in two parts finds what the comparison of all logits finds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import linexport
from linexport.artifact.checked import checked_artifact
from linexport.conversion.expected_time import LONGER, of_prompts
from linexport.conversion.revalidate import reopen
from linexport.manifest.proof import StreamingRecord
from linexport.parity import ModelUnderTest, check_streaming, library
from linexport.parity.cases import ChosenSizes
from linexport.parity.language import check, prompts
from linexport.parity.language import split as splitting
from linexport.parity.language.check import check_parts
from linexport.parity.language.split import split_model
from linexport.parity.reference.extra_outputs import Change
from linexport.parity.reference.module import Reference
from linexport.parity.streams.check import FEW_SINGLE
from linexport.system.progress import Silent, Stopwatch
from linexport.targets.lowering.kept_logits import find_head, made_of
from linexport.targets.lowering.split_head import HIDDEN, find_stretch
from tests.support.families import TINY, save_model

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

LOGITS, WORDS, OTHER = "logits", 97, 17
CONFIGURATIONS = {
    "tied": ("qwen3_5_text", {"tie_word_embeddings": True, "vocab_size": WORDS}),
    "scaled": (
        "granitemoehybrid",
        {
            "tie_word_embeddings": False,
            "vocab_size": WORDS,
            "logits_scaling": 3.0,
            "num_local_experts": 0,  # near ties of routers are settled before a failure is stated
        },
    ),
}


@pytest.fixture(autouse=True)
def few_words_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MIN_VOCABULARY", 1)
    monkeypatch.setattr(check, "GREEDY_STEPS", 4)
    monkeypatch.setattr(prompts, "STEPS", 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``made(name)``: the artifact of a configuration, converted once."""
    pytest.importorskip("transformers", reason="needs the hf extra")

    @functools.cache
    def convert(name: str) -> Path:
        model_type, changes = CONFIGURATIONS[name]
        work = tmp_path_factory.mktemp(name)
        save_model({**TINY[model_type], **changes}, model_type, work / "model")
        linexport.convert(work / "model", work / "artifact", bench=False, threads=1)
        return work / "artifact"

    return convert


@pytest.fixture(params=CONFIGURATIONS)
def artifact(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Path:
    return made(request.param)


def opened(artifact: Path, fault: Change = lambda model: None) -> ModelUnderTest:
    """The artifact beside its original, its graph changed, at two lengths."""
    checked = checked_artifact(artifact)
    tested = reopen(checked, None, 1, False, Stopwatch(Silent()))
    changed = tested.open_changed
    assert changed is not None

    def both(change: Change, model: onnx.ModelProto) -> None:
        fault(model)
        change(model)

    def open_changed(change: Change) -> Any:
        return changed(partial(both, change))

    return replace(
        tested,
        open=partial(changed, fault),
        open_changed=open_changed,
        chosen=ChosenSizes((7, 65), (1, 3)),
    )


def test_a_conversion_compares_hidden_states_and_the_head(artifact: Path) -> None:
    found = checked_artifact(artifact).manifest
    assert found.status == "ok" and found.parity is not None
    assert {case.output for case in found.parity.cases} == {HIDDEN}
    head = found.parity.head
    assert head is not None and head.passed
    assert 400 <= head.positions < head.tokens
    assert head.bound is not None and 0 < head.bound < 5e-5
    assert found.streaming.passed and found.parity.greedy.passed
    assert found.library is None or found.library.passed is not False


def head_of(model: onnx.ModelProto) -> onnx.NodeProto:
    found = find_head(model.graph, LOGITS)
    assert found is not None
    return found


def with_weight(change: Callable[[np.ndarray], np.ndarray], model: onnx.ModelProto) -> None:
    """Give the head a matrix (W, V) of its own, which is changed."""
    head, graph = head_of(model), model.graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    made = {name: node for node in graph.node for name in node.output}
    name = head.input[1]
    value = stored[name] if name in stored else stored[made[name].input[0]].T
    graph.initializer.append(numpy_helper.from_array(change(value.copy()), "wrong"))
    head.input[1] = "wrong"


def wrong_word(matrix: np.ndarray) -> np.ndarray:
    matrix[:, OTHER] *= 1.001
    return matrix


def behind_logits(op: str, value: float | np.ndarray, model: onnx.ModelProto) -> None:
    """Have an operator between the product and the logits."""
    head, graph = head_of(model), model.graph
    own, head.output[0] = head.output[0], "before"
    at = next(i for i, node in enumerate(graph.node) if node is head)
    graph.initializer.append(numpy_helper.from_array(np.float32(value), "of"))
    graph.node.insert(at + 1, helper.make_node(op, ["before", "of"], [own]))


def capped(model: onnx.ModelProto) -> None:
    head, graph = head_of(model), model.graph
    own, head.output[0] = head.output[0], "before"
    at = next(i for i, node in enumerate(graph.node) if node is head)
    cap = numpy_helper.from_array(np.float32(30), "cap")
    graph.initializer.append(cap)
    nodes = [("Div", ["before", "cap"], "a"), ("Tanh", ["a"], "b"), ("Mul", ["b", "cap"], own)]
    for place, (op, given, result) in enumerate(nodes, at + 1):
        graph.node.insert(place, helper.make_node(op, given, [result]))


def on_hidden(op: str, value: float, model: onnx.ModelProto) -> None:
    """Change what is given to the head."""
    head, graph = head_of(model), model.graph
    at = next(i for i, node in enumerate(graph.node) if node is head)
    graph.initializer.append(numpy_helper.from_array(np.float32(value), "of"))
    graph.node.insert(at, helper.make_node(op, [head.input[0], "of"], ["moved"]))
    graph.node[at + 1].input[0] = "moved"


BIAS = np.zeros(WORDS)
BIAS[OTHER] = 1e-2

FAULTS: dict[str, Change] = {
    "a wrong row of the head": partial(with_weight, wrong_word),
    "a permuted vocabulary": partial(with_weight, lambda matrix: np.roll(matrix, 1, axis=1)),
    "another matrix for the head": partial(with_weight, lambda matrix: matrix[::-1]),
    "a bias of one word": partial(behind_logits, "Add", BIAS),
    "another scale": partial(behind_logits, "Mul", 1.001),
    "a cap": capped,
    "hidden states of another scale": partial(on_hidden, "Mul", 1.001),
    "hidden states that are shifted": partial(on_hidden, "Add", 1e-3),
}


SCALED = (
    *("a wrong row of the head", "a bias of one word", "another scale"),
    "hidden states that are shifted",
)
"""Faults on both sides of the product, which factors behind it may hide."""


@pytest.mark.parametrize(
    ("artifact", "fault"),
    [*(("tied", fault) for fault in FAULTS), *(("scaled", fault) for fault in SCALED)],
    indirect=["artifact"],
)
def test_both_comparisons_find(artifact: Path, fault: str) -> None:
    tested = opened(artifact, FAULTS[fault])
    parts = split_model(tested)
    assert parts is not None
    assert not check_parts(tested, parts, 0).passed
    assert not check_parts(tested, None, 0).passed


def test_a_head_that_is_wrong_beyond_a_word_is_found_by_what_the_head_is_given(
    artifact: Path,
) -> None:
    """The bound sends positions to the comparison of logits at which hidden states differ."""
    tested = opened(artifact)
    parts = split_model(tested)
    assert parts is not None and check_parts(tested, parts, 0).passed
    expected, got = (np.concatenate(own) for own in zip(*parts.kept, strict=True))
    weight = parts.head.weight.detach().double().numpy()
    apart = parts.stretch * np.abs((got - expected).astype(np.float64) @ weight.T).max(-1)
    assert (apart <= parts.bounds(expected, got) * (1 + 1e-9)).all()


def test_hidden_states_off_at_a_few_tokens_have_their_logits_compared(artifact: Path) -> None:
    tested = opened(artifact)
    parts = split_model(tested)
    assert parts is not None
    original = parity_original(parts)
    tokens, width = 3000, parts.head.in_features
    hidden = np.random.default_rng(0).standard_normal((tokens, width)).astype(np.float32)
    moved = hidden.copy()
    moved[[5, 2999]] += np.float32(1e-2)
    parts.keep(hidden, moved)
    found = parts.check(original, 0)
    assert not found.passed and found.positions <= splitting.POSITIONS + 2
    parts.kept.clear()
    parts.keep(hidden, hidden)
    assert parts.check(original, 0).passed


def parity_original(parts: splitting.SplitModel) -> Any:
    import torch

    from linexport.parity.reference.module import Reference

    return Reference(parts.decoder.loaded, torch.float32)


def test_a_head_that_mixes_tokens_is_compared_as_a_whole(artifact: Path) -> None:
    def mixing(model: onnx.ModelProto) -> None:
        graph = model.graph
        name = next(o.name for o in graph.output if o.name == LOGITS)
        [last] = [node for node in graph.node if name in node.output]
        last.output[0] = "before"
        graph.initializer.append(numpy_helper.from_array(np.array(1), "axis"))
        graph.node.append(helper.make_node("CumSum", ["before", "axis"], [name]))

    assert split_model(opened(artifact, mixing)) is None


def test_factors_behind_the_head_stretch_differences() -> None:
    def stretch(*behind: tuple[str, list[str], str]) -> float | None:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        nodes += [helper.make_node(op, given, [result]) for op, given, result in behind]
        kind = onnx.TensorProto.FLOAT
        stored = {"w": np.ones((2, 4)), "of": np.array([2.0, -4.0, 1.0, 0.5])}
        graph = helper.make_graph(
            nodes,
            "head",
            [helper.make_tensor_value_info("x", kind, [1, None, 2])],
            [helper.make_tensor_value_info(nodes[-1].output[0], kind, [1, None, 4])],
            [numpy_helper.from_array(np.float32(v), name) for name, v in stored.items()],
        )
        model = helper.make_model(graph)
        assert list(made_of(graph, nodes[-1].output[0]))
        return find_stretch(model, nodes[-1].output[0])

    assert stretch() == 1
    assert stretch(("Mul", ["y", "of"], "z")) == 4
    assert stretch(("Div", ["y", "of"], "z")) == 2
    assert stretch(("Tanh", ["y"], "t"), ("Mul", ["of", "t"], "z")) == 4
    assert stretch(("Add", ["y", "of"], "z")) == 1
    assert stretch(("Div", ["of", "y"], "z")) is None
    assert stretch(("Exp", ["y"], "z")) is None


def test_the_first_row_of_a_batch_is_the_prompt_without_padding(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original is run once for it, and once for each other row."""
    tested = opened(made("tied"))
    original = check._Original(tested.loaded, torch.float32)
    trials = [t for t in prompts.plan_prompts(tested.dims, None, 0) if len(t.pieces) == 1]
    lengths: list[int] = []
    run = check.run_batch

    def counted(reference: Reference, prompt: prompts.Prompt) -> np.ndarray:
        lengths.append(prompt.tokens.shape[1])
        return run(reference, prompt)

    monkeypatch.setattr(check, "run_batch", counted)
    for length in (7, 65):
        alone, *padded = (t.prompt(WORDS) for t in trials if t.case.sizes["seq"] == length)
        expected = original.run_reference(alone)
        for prompt in padded:
            np.testing.assert_array_equal(original.run_reference(prompt)[:length], expected)
        assert lengths == [length, *(row.tokens.shape[1] for row in padded[0].rows()[1:])]
        lengths.clear()


def test_the_forecast_counts_the_tokens_that_the_original_runs(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = opened(made("tied"))
    original, run = check._Original(tested.loaded, torch.float32), list[int]()

    def counted(reference: Reference, prompt: prompts.Prompt) -> np.ndarray:
        run.append(prompt.tokens.size)
        return np.zeros((*prompt.tokens.shape, 1), np.float32)

    monkeypatch.setattr(check, "run_batch", counted)
    context = original.language.context
    trials = prompts.plan_prompts(tested.dims, context, 0, tested.chosen, True, sides=False)
    planned = [trial.prompt(WORDS) for trial in trials]
    for prompt in planned:
        original.run_reference(prompt)
    tokens = sum(run) + sum(prompt.tokens.size for prompt in planned)
    # A call of one token takes no time, and one of n tokens n - 1 seconds.
    found = of_prompts(tested, lambda sizes: sizes["seq"] - 1.0)
    assert found == pytest.approx(tokens * (LONGER - 1) / LONGER)


def test_pieces_of_the_library_have_few_single_tokens_of_many_words(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = opened(made("tied"))
    splits: list[tuple[int, ...]] = []

    def watched(*given: Any, **named: Any) -> StreamingRecord:
        found = check_streaming(*given, **named)
        splits.extend(found.splits)
        return found

    monkeypatch.setattr(library, "check_streaming", watched)
    found = library.check_library(tested, tested, None)
    assert found.passed and splits[0] == (1,) * FEW_SINGLE + (110,)
