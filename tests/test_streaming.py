"""The check that a model streams: what it lets pass, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from linexport.graph.dims import DimRange
from linexport.graph.states import State
from linexport.loaders import LoadedModel, Source
from linexport.loaders.loaded_model import LanguageFacts
from linexport.parity import ModelUnderTest, check_streaming

DIMS = {"batch": DimRange(batch=True), "seq": DimRange()}
SHAPE = ("batch", "seq", 4)


class RunningSum(torch.nn.Module):
    """Of x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class Lossy(RunningSum):
    """The same, less a large number that was added: float32 loses digits, float64 does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(1) + 1e5) - 1e5


class Session:
    """The running sum with a state, wrong in ways to choose.

    Attributes:
        apart: share of the largest output by which calls that continue are off.
        state_off: added to every present state of a call that continues.
        read: share of the state that is read: 0 forgets earlier tokens.
    """

    def __init__(self, apart: float = 0.0, state_off: float = 0.0, read: float = 1.0) -> None:
        self.apart, self.state_off, self.read = apart, state_off, read

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        past, seen = inputs["past"][:, :4], inputs["past"][:, 4:]
        out = inputs["x"].cumsum(1) + self.read * past[:, None]
        present = out[:, -1] if self.read else np.zeros_like(past)
        continues = np.any(seen > 0)
        if continues:
            out = out + self.apart * np.abs(out).max()
        # A second half that nothing reads, as the rows of a state that no query meets.
        rest = seen + inputs["x"].shape[1] + self.state_off * continues
        return {"out": out, "present": np.concatenate([present, rest], 1).astype(np.float32)}


def under_test(session: Session, original: type[RunningSum] = RunningSum) -> ModelUnderTest:
    source = Source("factory", "tests", None, "a running sum")
    loaded = LoadedModel(original(), (torch.randn(1, 16, 4),), {}, None, source)
    held = State("past", "present", "float32", ("batch", 8), "RunningSum")
    return ModelUnderTest(
        loaded,
        lambda: session,
        ["x"],
        [SHAPE],
        ["out"],
        [SHAPE],
        [held],
        DIMS,
        {"batch": 1, "seq": 16},
    )


def test_a_running_sum_streams() -> None:
    found = check_streaming(under_test(Session()))
    assert found.passed is True and found.reason is None
    assert found.max_relative_error is not None
    assert found.max_relative_error < 1e-5


def test_what_the_original_loses_to_rounding_is_allowed_and_no_more() -> None:
    found = check_streaming(under_test(Session(apart=2e-4), Lossy))
    assert found.passed is True
    found = check_streaming(under_test(Session(apart=5e-3), Lossy))
    assert found.passed is False
    assert check_streaming(under_test(Session(apart=2e-4))).passed is False


@pytest.mark.parametrize("wrong", [{"read": 0.0}, {"read": 0.99}, {"apart": 2e-4}])
def test_what_differs_in_pieces_does_not_pass(wrong: dict[str, float]) -> None:
    found = check_streaming(under_test(Session(**wrong)))
    assert found.passed is False
    assert "out differs" in str(found.reason)


def test_a_language_model_is_fed_in_pieces_within_its_context() -> None:
    tested = under_test(Session())
    facts = LanguageFacts(vocabulary=9, context=40, layers=())
    tested = replace(tested, loaded=replace(tested.loaded, language=facts))
    found = check_streaming(tested)
    assert found.passed and {sum(pieces) for pieces in found.splits} == {40}


def test_states_that_differ_do_not_pass_even_where_no_output_tells() -> None:
    found = check_streaming(under_test(Session(state_off=1.0)))
    assert found.passed is False
    assert "the state present differs by" in str(found.reason)
