"""The check that a model streams: what it lets pass, and what not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from linexport.dims import DimRange
from linexport.loaders import LoadedModel, Source
from linexport.parity import Streaming, Subject, check_streaming
from linexport.parity.tolerances import ROUNDING
from linexport.states import State

DIMS = {"batch": DimRange(batch=True), "seq": DimRange()}
SHAPE = ("batch", "seq", 4)


class RunningSum(torch.nn.Module):
    """Of x, exact in float64; in float32 each output is off by ``loses`` times the largest."""

    def __init__(self, loses: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("loses", torch.tensor(loses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = x.cumsum(1)
        lost = self.loses * sums.abs().max() if x.dtype == torch.float32 else 0.0
        return sums + lost


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


def subject(session: Session, loses: float = 0.0) -> Subject:
    source = Source("factory", "tests", None, "a running sum")
    loaded = LoadedModel(RunningSum(loses), (torch.randn(1, 16, 4),), {}, None, source)
    held = State("past", "present", "float32", ("batch", 8), "RunningSum")
    return Subject(
        loaded, session, ["x"], [SHAPE], ["out"], [SHAPE], [held], DIMS, {"batch": 1, "seq": 16}
    )


def test_a_running_sum_streams() -> None:
    found = check_streaming(subject(Session()))
    assert found.passed is True and found.reason is None
    assert found.rounding == 0.0 and found.max_relative_error is not None
    assert found.max_relative_error < 1e-5


@pytest.mark.parametrize("read", [0.0, 0.99])
def test_a_state_that_is_lost_or_worn_does_not_pass(read: float) -> None:
    found = check_streaming(subject(Session(read=read), loses=1e-4))
    assert found.passed is False
    assert "out differs" in str(found.reason)


@pytest.mark.parametrize(("share", "passes"), [(0.8, True), (1.25, False)])
def test_outputs_may_be_off_by_a_multiple_of_what_the_original_loses(
    share: float, passes: bool
) -> None:
    lost = 1e-3
    found = check_streaming(subject(Session(apart=share * ROUNDING * lost), loses=lost))
    assert found.passed is passes
    assert found.rounding == (pytest.approx(lost, rel=0.02) if passes else 0.0)


def test_an_original_that_loses_nothing_excuses_nothing() -> None:
    found = check_streaming(subject(Session(apart=2e-4)))
    assert found.passed is False and found.rounding == 0.0


def test_states_may_differ_where_no_output_tells_them_apart() -> None:
    found = check_streaming(subject(Session(state_off=1.0)))
    assert found.passed is True
    assert found.max_relative_error is not None and found.max_relative_error > 1e-3


def test_states_that_differ_are_told_by_what_follows() -> None:
    class Late(Session):
        """Adds to the last state of a sequence in pieces alone, so that only what follows tells."""

        def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            found = super().run(inputs)
            self.tokens = getattr(self, "tokens", 0) + inputs["x"].shape[1]
            if inputs["x"].shape[1] < 150 and self.tokens % 150 == 0:
                found["present"][:, :4] += 10
            return found

    found = check_streaming(subject(Late()))
    assert found == Streaming(False, found.reason, found.max_relative_error, found.splits)
    assert "the state present differs by" in str(found.reason)
    assert str(found.reason).endswith("and out after it")
