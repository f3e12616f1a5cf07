"""The expected time of long stages, said before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from linexport.artifact.checked import checked_artifact
from linexport.conversion import expected_time, revalidate
from linexport.conversion.expected_time import IN_FLOAT64, comparison, measurement, say_measurement
from linexport.parity import ModelUnderTest
from linexport.parity.cases import plan_cases
from linexport.parity.reference.outputs import PATIENCE
from linexport.sources.factory import load_module
from linexport.system.progress import Silent, Stopwatch
from linexport.timing.latency import FULL, SHORT


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        """See ``Progress``."""
        self.said.append(text)


@pytest.fixture
def tested(converted: Callable[..., Path], factories: SimpleNamespace) -> ModelUnderTest:
    checked = checked_artifact(converted("small"))
    return revalidate.reopen(checked, factories.source("small"), 1, False, Stopwatch(Silent()))


def tokens(sizes: Mapping[str, int]) -> int:
    return sizes["batch"] * sizes["seq"]


@pytest.mark.parametrize("power", [1, 2])
def test_a_comparison_takes_the_calls_of_its_cases(
    tested: ModelUnderTest, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose calls take time by the length, or by its square."""

    def seconds(sizes: Mapping[str, int]) -> float:
        return 1e-9 * sizes["batch"] * sizes["seq"] ** power

    cases = plan_cases(tested.dims, tested.traced, True, 0, tested.input_shapes)
    expected = (1 + IN_FLOAT64) * sum(seconds(c.sizes) for c in cases)
    monkeypatch.setattr(expected_time, "SURE", 0.0)
    assert comparison(tested, seconds) == pytest.approx(expected, rel=0.1)


def test_a_short_comparison_calls_once_and_says_nothing(
    tested: ModelUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def seconds(tested: ModelUnderTest, sizes: Mapping[str, int]) -> float:
        calls.append(sizes)
        return 1e-6 * tokens(sizes)

    notes = Notes()
    monkeypatch.setattr(expected_time, "_seconds_of_call", seconds)
    expected_time.say_comparison(notes, tested)
    assert len(calls) == 1 and not notes.said
    monkeypatch.setattr(expected_time, "_seconds_of_call", lambda t, s: 4e-3 * tokens(s))
    expected_time.say_comparison(notes, tested)
    [said] = notes.said
    assert said.startswith("    Comparing it with the original takes about ") and said.endswith(
        " s."
    )


def test_what_takes_too_long_is_not_run_in_float64(tested: ModelUnderTest) -> None:
    def seconds(sizes: Mapping[str, int]) -> float:
        return 1e-2 * tokens(sizes)

    cases = plan_cases(tested.dims, tested.traced, True, 0, tested.input_shapes)
    singles = [seconds(case.sizes) for case in cases]
    assert max(singles) > PATIENCE > min(singles)
    expected = sum(one if one > PATIENCE else (1 + IN_FLOAT64) * one for one in singles)
    assert comparison(tested, seconds) == pytest.approx(expected, rel=0.1)


def test_a_model_that_fails_is_left_to_the_comparison(tested: ModelUnderTest) -> None:
    assert comparison(tested, lambda sizes: 0.0) == 0.0


class Branched(nn.Module):
    """A module whose branches torch would compile first, where nobody keeps it from that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


def test_the_original_runs_as_it_does_in_the_comparison(
    tested: ModelUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*given: object) -> None:
        raise AssertionError("branches are compiled")

    monkeypatch.setattr("torch._higher_order_ops.utils._hop_compile_and_call", compiled)
    loaded = load_module((Branched(), (torch.randn(2, 12, 4),)), "branched:module")
    names = {"batch": 2, "seq": 12}
    found = replace(tested, loaded=loaded, input_shapes=(("batch", "seq", 4),))
    assert expected_time._seconds_of_call(found, names) > 0


def test_a_full_measurement_is_forecast_and_a_short_one_is_not(tested: ModelUnderTest) -> None:
    notes = Notes()
    say_measurement(notes, tested, SHORT, 0, 3.0)
    assert not notes.said
    say_measurement(notes, tested, FULL, 0, 3.0)
    assert notes.said == ["    Measuring it takes about 40 s."]
    assert measurement(FULL, 4, 400.0) == 100 + measurement(FULL, 4, 0.0)
