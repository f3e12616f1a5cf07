"""Recurrences that begin with a stored state, and are read before a step or after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.loops.test_loops import Recurrence
from tests.support.loops import check_streams, operators, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")


class Begun(Recurrence):
    """A state of 8 channels that fades by gates, by one number or by a number of each channel."""

    def __init__(
        self, rate: str, before: bool, number: float | None = None, gated: bool = False
    ) -> None:
        super().__init__()
        self.rate, self.before, self.number, self.gated = rate, before, number, gated
        self.first = nn.Parameter(torch.linspace(-2, 2, 8))
        self.rates = nn.Parameter(torch.linspace(-1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first.expand(x.shape[0], 8)
        if self.number is not None:
            h = torch.full_like(x[:, 0], self.number)
        out = []
        for t in range(x.shape[1]):
            before = h
            gates = {"gates": x[:, t].sigmoid(), "number": 0.9, "channels": self.rates.sigmoid()}
            h = gates[self.rate] * h + x[:, t]
            found = before if self.before else h
            out.append(found * x[:, t] - 0.5 * x[:, t] if self.gated else found)
        return torch.stack(out, 1)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("rate", ["gates", "number", "channels"])
def test_a_stored_state_is_read_before_a_step_or_after_it(rate: str, before: bool) -> None:
    module = Begun(rate, before)
    found = rewritten(module)
    assert [name for name in operators(found) if name != "CausalConvWithState"] == [
        "LinearAttention"
    ]
    check_streams(found, module)


def test_a_state_of_numbers_is_read_before_a_step() -> None:
    module = Begun("number", before=True, number=3.0)
    found = rewritten(module)
    assert operators(found) == ["CausalConvWithState", "LinearAttention"]
    check_streams(found, module)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("rate", ["gates", "number", "channels"])
def test_what_is_read_may_be_gated_in_the_step(rate: str, before: bool) -> None:
    module = Begun(rate, before, gated=True)
    found = rewritten(module)
    assert [name for name in operators(found) if name != "CausalConvWithState"] == [
        "LinearAttention"
    ]
    check_streams(found, module)


class FadedOnce(Begun):
    """What is read has met the decay of the step, and not what the step adds."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.first.expand(x.shape[0], 8), []
        for t in range(x.shape[1]):
            kept = 0.9 * h if self.rate == "number" else x[:, t].sigmoid() * h
            out.append(kept)
            h = kept + x[:, t]
        return torch.stack(out, 1)


@pytest.mark.parametrize("rate", ["gates", "number"])
def test_a_state_is_read_after_it_has_faded_alone(rate: str) -> None:
    module = FadedOnce(rate, before=True)
    found = rewritten(module)
    assert "Scan" not in operators(found) and "LinearAttention" in operators(found)
    check_streams(found, module)
