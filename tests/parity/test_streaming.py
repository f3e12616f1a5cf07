"""The check that a model streams: what it lets pass, and what not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from linexport.graph.dims import DimRange
from linexport.graph.states import State
from linexport.parity import ModelUnderTest, WholeRuns, check_streaming
from linexport.parity.streams import check as streaming
from linexport.parity.streams.check import OtherKernels
from linexport.parity.streams.splits import LONG_STREAM, SPLIT_TOKENS
from linexport.sources import LoadedModel, Source
from linexport.sources.loaded_model import LanguageFacts

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


class Counting(Session):
    """The running sum by kernels of its own, the lengths of whose calls are kept.

    Attributes:
        scale: factor on outputs and the state's first half, by which every call is off.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale, self.lengths = np.float32(scale), list[int]()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.lengths.append(inputs["x"].shape[1])
        past = inputs["past"].copy()
        past[:, :4] /= self.scale
        found = super().run({**inputs, "past": past})
        found["present"][:, :4] *= self.scale
        return {"out": found["out"] * self.scale, "present": found["present"]}


def test_a_sequence_is_run_whole_once() -> None:
    runs, session, again = WholeRuns(), Counting(), Counting()
    first = check_streaming(under_test(session), runs=runs)
    whole = session.lengths.count(SPLIT_TOKENS) + session.lengths.count(LONG_STREAM)
    assert first.passed and len(first.splits) == 5 and whole == 2
    against = OtherKernels(runs, lambda length: {})
    second = check_streaming(under_test(again), against=against)
    assert second.passed and second.splits == first.splits
    assert sorted(again.lengths) == sorted(n for split in first.splits for n in split)


def test_pieces_are_compared_with_what_other_kernels_gave_whole() -> None:
    runs = WholeRuns()
    assert check_streaming(under_test(Session()), runs=runs).passed
    wrong = under_test(Counting(1.001))
    assert check_streaming(wrong).passed  # with itself it agrees
    found = check_streaming(wrong, against=OtherKernels(runs, lambda length: {}))
    assert found.passed is False and "out differs by 1.0e-03" in str(found.reason)
    # What the original loses is allowed for in sequences of the length in which it does.
    off = under_test(Counting(1.0001))
    assert check_streaming(off, against=OtherKernels(runs, lambda length: {})).passed is False
    lossy = OtherKernels(runs, lambda length: {"out": 1.0 if length == SPLIT_TOKENS else 0.0})
    found = check_streaming(off, against=lossy)
    assert found.passed is False and f"sequence of {LONG_STREAM:,} tokens" in str(found.reason)


class Delay(RunningSum):
    """x of ``lag`` tokens before."""

    lag = 400

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, self.lag, 0))[:, : x.shape[1]]


class Delaying:
    """The delay with a state of ``rows`` tokens, which stand for all it should have.

    Attributes:
        rows: tokens that the state has.
        lag: tokens of the delay.
        seconds: that a call takes for a thousand tokens.
    """

    def __init__(self, rows: int, lag: int, seconds: float = 0.0) -> None:
        self.rows, self.lag, self.seconds = rows, lag, seconds
        self.calls: list[int] = []

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        self.calls.append(x.shape[1])
        time.sleep(self.seconds * x.shape[1] / 1000)
        seen = np.concatenate([inputs["past"], x], 1)
        missing = np.zeros((len(x), self.lag - self.rows, 4), np.float32)
        out = np.concatenate([missing, seen], 1)[:, : x.shape[1]]
        return {"out": out, "present": seen[:, -self.rows :]}


def delayed(session: Delaying, **changed: object) -> ModelUnderTest:
    tested = under_test(session, Delay)
    held = State("past", "present", "float32", ("batch", session.rows, 4), "Delay")
    return replace(tested, states=[held], **changed)


def test_a_delay_of_more_than_a_short_sequence_is_tried_past_its_constant() -> None:
    assert check_streaming(delayed(Delaying(400, 400))).passed
    found = check_streaming(delayed(Delaying(300, 400)))
    assert found.passed is False and "2,100 tokens" in str(found.reason)


def test_what_reaches_back_further_than_a_long_sequence_is_tried_at_twice_that() -> None:
    assert check_streaming(delayed(Delaying(2990, 3000))).passed  # nobody knows that it does
    found = check_streaming(delayed(Delaying(2990, 3000), reaches=(3000,)))
    assert found.passed is False and "6,016 tokens" in str(found.reason)
    found = check_streaming(delayed(Delaying(3000, 3000), reaches=(3000,)))
    assert found.passed and sum(found.splits[-1]) == 6016
    ends = np.cumsum(found.splits[-1])
    assert {3000, 3001, 3002, 6000, 6001, 6002, 6014, 6015} <= set(ends)  # single tokens


def test_no_sequence_is_longer_than_the_artifact_takes_in_its_calls() -> None:
    session = Delaying(2990, 3000)
    dims = {**DIMS, "seq": DimRange(max=512)}
    found = check_streaming(delayed(session, dims=dims, reaches=(3000,)))
    assert found.passed is False and max(session.calls) == 512


class Chunks:
    """The mean of the tokens of a call, as of a model that is not causal."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        return {"out": x - x.mean(1, keepdims=True), "present": inputs["past"]}


def test_tokens_in_multiples_are_fed_in_several_multiples() -> None:
    dims = {**DIMS, "seq": DimRange(256, None, 256 * 64, multiple=256)}
    tested = replace(under_test(Chunks()), dims=dims)
    found = check_streaming(tested)
    assert found.passed is False and "256, 256" in str(found.reason)
    tested = replace(under_test(Session()), dims=dims)
    splits = check_streaming(tested).splits
    assert splits[0] == (256,) * 6 and splits[1] == (256, 512, 768)
    assert all(size % 256 == 0 for pieces in splits for size in pieces)


def test_one_piece_is_not_a_comparison() -> None:
    one = {**DIMS, "seq": DimRange(256, None, 256, multiple=256)}
    found = check_streaming(replace(under_test(Session()), dims=one))
    assert found.passed is False and found.splits == ()
    assert "nothing was compared: seq is 256 to 256" in str(found.reason)


def test_what_would_take_long_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PATIENCE", 0.1)
    session = Delaying(300, 400, seconds=0.1)
    found = check_streaming(delayed(session))
    assert found.passed and "tokens would take" in str(found.skipped)
    assert max(session.calls) < 2100


class Forgetting(Session):
    """The running sum, whose count stops at 3,000 tokens."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = super().run(inputs)
        seen = inputs["past"][:, 4:].max() + inputs["x"].shape[1]
        found["present"][:, 4:] = min(seen, 3000) if inputs["x"].shape[1] > 1 else seen
        return found


def test_states_of_a_language_model_are_compared_after_4096_tokens() -> None:
    tested = under_test(Forgetting())
    assert check_streaming(tested).passed
    facts = LanguageFacts(vocabulary=9, context=None, layers=())
    tested = replace(tested, loaded=replace(tested.loaded, language=facts))
    found = check_streaming(tested)
    assert found.passed is False
    assert "the state present differs" in str(found.reason) and "4,096" in str(found.reason)
