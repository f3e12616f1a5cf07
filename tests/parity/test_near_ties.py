"""Routers whose experts have nearly the same score: rounding decides, in the original as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import linexport
from linexport import parity
from linexport.artifact.checked import checked_artifact
from linexport.conversion.revalidate import reopen
from linexport.manifest import MODEL
from linexport.parity import diverge
from linexport.parity.cases import Case, ChosenSizes
from linexport.parity.reference.extra_outputs import Change, open_changed
from linexport.parity.reference.plain_export import PlainExport
from linexport.parity.routing.choices import recording
from linexport.parity.routing.near_ties import ForcedChoices, decide
from linexport.parity.tolerances import TOLERANCES
from linexport.system.progress import Silent, Stopwatch
from linexport.targets.base import OrtSession
from linexport.trace import trace
from tests.support.compared import check_language

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

VOCABULARY, WIDTH, TIE = 256, 8, 3
FLOAT32 = TOLERANCES["float32"]
FACTORY = "tests.support.factories.mixtures:"


class Routed(nn.Module):
    """Logits of one of two experts by scores, which for one token are nearly the same."""

    def __init__(self, margin: float = 0.0) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        scores, apart = random.standard_normal(VOCABULARY), random.standard_normal(VOCABULARY)
        scores[TIE], apart[TIE] = 1.0, -margin
        assert np.sort(np.abs(apart))[1] > 1e-3
        experts = random.standard_normal((2, VOCABULARY, VOCABULARY))
        named = {"scores": np.stack([scores, scores + apart], 1), "experts": experts}
        for name, value in named.items():
            held = nn.Parameter(torch.from_numpy(np.float32(value)), requires_grad=False)
            self.register_parameter(name, held)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        chosen = self.scores[input_ids].argmax(-1)
        found: Tensor = self.experts[chosen, input_ids]
        return found


def routed(scores: np.ndarray, experts: np.ndarray) -> onnx.ModelProto:
    """The same in ONNX."""
    held = {"scores": scores, "experts": experts, "last": np.array([-1])}
    nodes = [
        helper.make_node("Gather", ["scores", "input_ids"], ["s"]),
        helper.make_node("ArgMax", ["s"], ["chosen"], axis=-1),
        helper.make_node("Unsqueeze", ["input_ids", "last"], ["ids"]),
        helper.make_node("Concat", ["chosen", "ids"], ["places"], axis=-1),
        helper.make_node("GatherND", ["experts", "places"], ["logits"]),
    ]
    tokens = [
        helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "seq"])
        for name in ("input_ids", "attention_mask")
    ]
    logits = helper.make_tensor_value_info(
        "logits", onnx.TensorProto.FLOAT, ["batch", "seq", VOCABULARY]
    )
    weights = [numpy_helper.from_array(value, name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "routed", tokens, [logits], weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])


def checked(margin: float, by: float, error: float = 0.0) -> parity.Parity:
    """Parity of an artifact with another score for one token, and an error in its logits."""
    module = Routed(margin)
    scores, experts = (x.numpy().copy() for x in (module.scores, module.experts))
    scores[TIE, 1] += by
    experts[:, TIE] += np.float32(error)
    model = routed(scores, experts)

    def opened(change: Change = lambda model: None) -> OrtSession:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy)
        return OrtSession(copy.SerializeToString(), 1)

    return check_language(module, opened, VOCABULARY)


def said(notes: list[str]) -> list[str]:
    return [note for note in notes if "rounding decides" in note]


@pytest.mark.parametrize("margin", [0.0, 1e-6, 9e-5])
@pytest.mark.parametrize("by", [1e-4, -1e-4])
def test_an_artifact_may_decide_a_near_tie_either_way(margin: float, by: float) -> None:
    found = checked(margin, by)
    # The original takes the first expert: an artifact that takes the other says so.
    assert found.passed and len(said(found.notes)) == (by > 0)
    assert all(case.max_relative_error == 0 for case in found.cases)


@pytest.mark.parametrize("margin", [1.1e-4, 1e-3, 1.0])
def test_a_choice_that_rounding_does_not_decide_is_wrong(margin: float) -> None:
    """Scores of 1 may be off by 5.1e-5 each."""
    assert checked(margin, -margin).passed
    found = checked(margin, 2 * margin)
    assert not found.passed and not said(found.notes)


@pytest.mark.parametrize("by", [1e-4, -1e-4])
def test_what_the_chosen_expert_gives_is_compared_within_the_tolerance(by: float) -> None:
    assert not checked(0.0, by, 3e-3).passed


SCORES = torch.tensor([[5.0, 4.0, 3.0, 3.0 - 1e-6, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]])


@pytest.mark.parametrize(
    ("chosen", "ordered", "near"),
    [
        ([0, 1, 3], True, True),  # 3 - 1e-6 for 3
        ([3, 1, 0], False, True),
        ([3, 1, 0], True, False),  # the smallest first, where the largest is asked for
        ([0, 1, 4], True, False),
        ([0, 2, 3], False, False),  # the least is near, but 4 is left out
        ([0, 2, 2], False, False),  # twice
        ([0, 1, 5], False, False),  # one that does not exist
    ],
)
def test_every_choice_is_within_rounding_of_the_original(
    chosen: list[int], ordered: bool, near: bool
) -> None:
    def run(deciding: Any) -> Tensor:
        with deciding:
            return SCORES.topk(3, sorted=ordered).values.sum(-1)

    places = np.array([chosen, [4, 3, 2]])
    found = decide([run], [places], FLOAT32)
    assert (found is not None) is near
    if found is not None:
        assert (found.ties.differing, found.ties.of) == (1, 2)
        assert found.outputs[0].tolist() == pytest.approx([12 - 1e-6, 12])
    kept = np.array([[0, 1]])
    padded = decide([run], [np.array([[4, 3, 2], [4, 3, 2]])], FLOAT32, kept)
    assert padded is not None and padded.ties.differing == 0


def test_other_ways_to_choose() -> None:
    forced = [np.array([[3], [0]]), np.array([[3], [0]]), np.array([[1, 0], [0, 1]])]
    with ForcedChoices(forced) as mode:
        values, places = SCORES.max(1)
        smallest = SCORES.argmin(1, keepdim=True)
        pair = SCORES[:, :2].sort(-1, descending=True)
        SCORES.max(), torch.max(SCORES, SCORES), SCORES.long().topk(2), SCORES.topk(4)
    assert values.tolist() == pytest.approx([3 - 1e-6, 1.0]) and places.tolist() == [3, 0]
    assert smallest.tolist() == [[3], [0]] and pair.values.tolist() == [[4.0, 5.0], [1.0, 2.0]]
    assert [m.largest for m in mode.made] == [True, False, True]


def test_an_original_that_cannot_be_run_so_is_not_settled() -> None:
    def run(deciding: Any) -> np.ndarray:
        raise RuntimeError("no dispatch modes here")

    assert decide([run], [np.zeros((3, 1), np.int64)], FLOAT32) is None
    assert recording(None) is None and recording(partial(without_choices)) is None


def without_choices(change: Change) -> Any:
    change(onnx.ModelProto())
    raise AssertionError("it is not opened")


@pytest.fixture(
    scope="module", params=["mixtures", pytest.param("grouped_mixtures", marks=pytest.mark.slow)]
)
def mixture(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An artifact of four layers of 64 experts, two and two of which score alike."""
    folder = tmp_path_factory.mktemp("mixtures") / request.param
    source = FACTORY + request.param
    manifest = linexport.convert(source, folder, bench=False, threads=1)
    tested = reopen(checked_artifact(folder), source, 1, False, Stopwatch(Silent()))
    chosen = ChosenSizes(lengths=(1200,), batches=(1,))
    return SimpleNamespace(folder=folder, manifest=manifest, tested=replace(tested, chosen=chosen))


def test_many_near_ties_in_a_sequence_are_settled(mixture: Any) -> None:
    """In outputs, in what follows in pieces and single tokens, in states and in the library."""
    manifest = mixture.manifest
    assert manifest.status == "ok" and manifest.streaming.passed and manifest.library.passed
    errors = manifest.parity.max_relative_error, manifest.streaming.max_relative_error
    assert max(*errors, manifest.library.max_relative_error) < FLOAT32.relative
    [note] = said(manifest.warnings)
    assert "seq 4097" in note and int(note.split("rounding decides ")[1].split()[0]) > 100
    assert not [w for w in manifest.warnings if "loses" in w or "within 2%" in w]


def test_without_the_choices_of_the_artifact_they_are_failures(mixture: Any) -> None:
    blind = replace(mixture.tested, open_changed=None)
    streaming = parity.check_streaming(blind)
    assert not parity.check(blind).passed and streaming.passed is False
    assert parity.check(mixture.tested).passed


def sabotaged(mixture: Any, folder: Path, change: Callable[[dict[str, Any]], None]) -> Any:
    """The mixture with other weights; ``change`` is given them by name."""
    model = onnx.load(mixture.folder / MODEL)
    weights = {t.name: numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    change(weights)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    path = folder / MODEL
    onnx.save(model, path)
    opened = partial(OrtSession, threads=1)
    return replace(
        mixture.tested,
        open=lambda: opened(path),
        open_changed=lambda change: open_changed(path, change, opened),
    )


def nothing(weights: dict[str, Any]) -> None:
    """The artifact as it is."""


def other_router(weights: dict[str, Any]) -> None:
    """One expert of the second layer scores higher, by a hundredth of the scores."""
    [name] = [n for n, x in weights.items() if x.shape in ((16, 64), (64, 16)) and "1." in n]
    axis = weights[name].shape.index(64)
    np.moveaxis(weights[name], axis, 0)[5] *= 1.01


def exchanged_experts(weights: dict[str, Any]) -> None:
    """Two experts that score alike have each other's weights."""
    for name in ("1.up", "1.down"):
        weights[name][[4, 5]] = weights[name][[5, 4]]


@pytest.mark.parametrize(
    ("change", "passed"), [(nothing, True), (other_router, False), (exchanged_experts, False)]
)
def test_a_wrong_artifact_is_found_among_near_ties(
    mixture: Any, tmp_path: Path, change: Any, passed: bool
) -> None:
    tested = sabotaged(mixture, tmp_path, change)
    assert parity.check(tested).passed is passed


def test_near_ties_are_not_the_first_divergence(
    mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer is wrong; in those before it the artifact may choose otherwise."""
    # Another export is of no interest here, and takes most of the time.
    monkeypatch.setattr(diverge, "run_plain_export", lambda *_: PlainExport())

    def last_down(weights: dict[str, Any]) -> None:
        weights["3.down"] *= 1.01

    tested = sabotaged(mixture, tmp_path, last_down)
    traced = trace(tested.loaded)
    case = Case("random", {"batch": 1, "seq": 400}, 0)
    opened = partial(OrtSession, threads=1)
    found, blind = (
        parity.first_divergence(one, traced, tmp_path / MODEL, opened, case)
        for one in (tested, replace(tested, open_changed=None))
    )
    assert found is not None and found.layer == "3"
    assert blind is not None and blind.layer in ("0", "1", "2")


@pytest.mark.parametrize("name", ["output", "state"])
def test_an_error_where_nothing_is_near_is_found(mixture: Any, name: str) -> None:
    """Of one token in pieces, or of one value of a state after them."""
    inner, states = mixture.tested.open(), mixture.tested.states
    wrong = mixture.tested.output_names[0] if name == "output" else states[0].present

    def run(given: dict[str, np.ndarray]) -> Any:
        found = inner.run(given)
        if found[mixture.tested.output_names[0]].shape[1] == 1:
            found[wrong] = found[wrong].copy()
            found[wrong].flat[0] += 1e-2 * np.abs(found[wrong]).max()
        return found

    tested = replace(mixture.tested, open=lambda: SimpleNamespace(run=run))
    assert parity.check_streaming(tested).passed is False
