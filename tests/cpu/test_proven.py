"""What is proven of the library: by conversion, by validate, and what load makes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import linexport
from linexport import manifest as manifests
from linexport.artifact.checked import checked_artifact
from linexport.conversion.revalidate import reopen
from linexport.manifest import MODEL, Manifest, dumps, to_json
from linexport.manifest.proof import LibraryRecord
from linexport.parity import ModelUnderTest, WholeRuns, check_library, check_streaming
from linexport.parity.cases import ChosenSizes
from linexport.plugins.cpu import library
from linexport.report.verdict import checks
from linexport.system.progress import Silent, Stopwatch
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion.version import native_version
from linexport.timing.baselines import Bench
from linexport.timing.latency import BenchPlan, Settings


def stated(folder: Path, record: LibraryRecord | None) -> Manifest:
    """The artifact's manifest, written to say this of the library."""
    manifest = replace(manifests.read(folder), library=record)
    (folder / manifests.MANIFEST).write_text(dumps(to_json(manifest)))
    return manifest


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "CPU library" in r.getMessage()]


def test_conversion_compares_both_forms(
    converted: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    found = manifests.read(converted("small"))
    assert found.library is not None
    assert (found.library.against, found.library.passed) == ("functions", True)
    assert found.library.version == native_version()
    assert found.library.instruction_set == library.instruction_set()
    assert found.streaming is not None
    assert found.library.cases > len(found.streaming.splits) > 0
    assert [c.word for c in checks(found) if c.name == "Library"] == ["passed"]
    assert linexport.load(converted("small"), threads=1)._session.native
    assert warned(caplog) == []


@pytest.mark.parametrize(
    "record, words",
    [
        (None, "no CPU library was compared"),
        (LibraryRecord("functions", None, "not built"), "no CPU library was compared"),
        (LibraryRecord("functions", True, version="0123"), "another version of it was compared"),
    ],
)
def test_loading_says_that_the_library_was_not_compared(
    artifact: Path, caplog: pytest.LogCaptureFixture, record: LibraryRecord | None, words: str
) -> None:
    stated(artifact, record)
    with caplog.at_level(logging.WARNING):
        assert linexport.load(artifact, threads=1)._session.native
    assert [words in text for text in warned(caplog)] == [True]


def test_a_library_that_differed_is_not_what_is_timed(
    artifact: Path, factories: SimpleNamespace
) -> None:
    watch = Stopwatch(Silent())
    for passed in (True, False):
        manifest = stated(artifact, LibraryRecord("functions", passed, version="0123"))
        tested = reopen(checked_artifact(artifact), factories.source("small"), 1, False, watch)
        settings = Settings(warmup=1, repeats=1, threads=1)
        extent = BenchPlan("full", settings)
        bench = Bench(tested, artifact / MODEL, "ort", manifest.trusts_library, artifact, extent)
        assert bench.opened().native is passed


def test_a_library_that_differed_is_not_used(
    artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = stated(artifact, LibraryRecord("functions", False, "y differs at batch 1"))
    assert not linexport.load(artifact, threads=1)._session.native
    assert warned(caplog) == []
    (line,) = (c for c in checks(manifest) if c.name == "Library")
    assert line.tone == "bad" and "not used: y differs at batch 1" in line.detail


def test_validate_compares_the_library_with_the_original(
    artifact: Path, factories: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated(artifact, None)
    source = factories.source("small")
    found = linexport.validate(artifact, source=source, threads=1).library
    assert found is not None and (found.against, found.passed) == ("original", True)
    monkeypatch.setenv(library.SWITCH, "0")
    found = linexport.validate(artifact, source=source, threads=1).library
    assert found is not None and (found.passed, "switched off" in str(found.reason)) == (None, True)


class Wrong:
    """A session of the library with one result changed."""

    native = True

    def __init__(self, inner: OrtSession, name: str, change: Callable[[np.ndarray], Any]) -> None:
        self.inner, self.name, self.change = inner, name, change

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self.inner.run(inputs)
        return {**outputs, self.name: self.change(outputs[self.name])}


@pytest.fixture
def tested(converted: Callable[..., Path], factories: SimpleNamespace) -> ModelUnderTest:
    """The small model, opened by its functions."""
    folder = converted("small")
    watch = Stopwatch(Silent())
    found = reopen(checked_artifact(folder), factories.source("small"), 1, False, watch)
    chosen = ChosenSizes(lengths=(1, 37), batches=(2,))
    return replace(found, open=lambda: OrtSession(folder / MODEL, 1), chosen=chosen)


@pytest.mark.parametrize("place", ["output", "state"])
@pytest.mark.parametrize(
    "change", [lambda x: x * (1 + 1e-3), lambda x: x[..., :-1], lambda x: np.full_like(x, np.nan)]
)
def test_a_difference_is_found(
    tested: ModelUnderTest,
    converted: Callable[..., Path],
    place: str,
    change: Callable[[np.ndarray], Any],
) -> None:
    name = tested.output_names[0] if place == "output" else tested.states[0].present
    inner = OrtSession(converted("small") / MODEL, 1, native=True)
    found = check_library(tested, replace(tested, open=lambda: Wrong(inner, name, change)), None)
    assert found.passed is False and str(found.reason).startswith(f"{name} differs at ")
    assert check_library(tested, replace(tested, open=lambda: inner), None).passed


def test_pieces_are_compared_with_what_functions_give_whole(
    tested: ModelUnderTest, converted: Callable[..., Path]
) -> None:
    runs, output = WholeRuns(), tested.output_names[0]
    assert check_streaming(tested, runs=runs).passed
    inner = OrtSession(converted("small") / MODEL, 1, native=True)
    right = check_library(tested, replace(tested, open=lambda: inner), None, runs=runs)
    assert right.passed
    wrong = Wrong(inner, output, lambda x: x * (1 + 1e-3) if x.shape[1] > 100 else x)
    found = check_library(tested, replace(tested, open=lambda: wrong), None, runs=runs)
    assert found.passed is False and str(found.reason).startswith(f"in pieces: {output} differs")


class Rounding(torch.nn.Module):
    """The original, whose outputs lose digits: a 2^14-th of their largest, in float32 alone."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        large = 2**10 * output.abs().max()
        return (output + large) - large


def test_a_difference_within_what_the_original_loses_to_rounding_is_none(
    tested: ModelUnderTest, converted: Callable[..., Path]
) -> None:
    """Outputs alone are excused, and by what is measured of this original alone."""
    inner = OrtSession(converted("small") / MODEL, 1, native=True)
    loses = replace(tested, loaded=replace(tested.loaded, module=Rounding(tested.loaded.module)))
    output, state = tested.output_names[0], tested.states[0].present

    def passed(on: ModelUnderTest, name: str, error: float) -> bool | None:
        wrong = Wrong(inner, name, lambda x: x * (1 + error))
        return check_library(on, replace(on, open=lambda: wrong), None).passed

    assert passed(loses, output, 6e-5) is True and passed(tested, output, 6e-5) is False
    assert passed(loses, state, 6e-5) is False and passed(loses, output, 1e-3) is False


@pytest.mark.parametrize(("name", "length"), [("large", 37), ("random", 4097)])
def test_what_other_inputs_lose_excuses_nothing(
    tested: ModelUnderTest, converted: Callable[..., Path], name: str, length: int
) -> None:
    """Inputs a hundred times as large, or longer ones, lose more than these have."""
    parity, output = manifests.read(converted("small")).parity, tested.output_names[0]
    assert parity is not None
    lossy = [
        replace(case, rounding=1.0 if (case.name, case.length) == (name, length) else 0.0)
        for case in parity.cases
    ]
    assert max(case.rounding or 0.0 for case in lossy) == 1.0
    inner = OrtSession(converted("small") / MODEL, 1, native=True)
    wrong = replace(tested, open=lambda: Wrong(inner, output, lambda x: x * (1 + 1e-3)))
    assert check_library(tested, wrong, replace(parity, cases=tuple(lossy))).passed is False


def test_a_session_without_the_library_is_not_proof_of_it(tested: ModelUnderTest) -> None:
    found = check_library(tested, tested, None)
    assert found.passed is None and "does not compute a node" in str(found.reason)
