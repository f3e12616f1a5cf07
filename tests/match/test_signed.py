"""Decays that may be negative: where signs are written, that they are exact, what is carried."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes
from linexport.graph import states
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.loops import session_of

pytestmark = pytest.mark.usefixtures("one_thread")

Decay = Callable[[Tensor], Tensor]


class Recurrence(nn.Module):
    """h_t = f(a_t) h_{t-1} + b_t of a and b side by side."""

    def __init__(self, decay: Decay) -> None:
        super().__init__()
        self.decay = decay

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a, h, out = self.decay(a), torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def rewritten(module: nn.Module) -> onnx.ModelProto:
    example = (torch.randn(2, 16, 8),)
    source = load_module((module, example, ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)), "recurrence")
    found = passes.rewrite(trace(source).model)
    assert [n.op_type for n in found.model.graph.node if n.domain] == ["LinearAttention"]
    return found.model


def has_signs(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "Mod" for node in model.graph.node)


@pytest.mark.parametrize(
    "decay",
    [
        torch.sigmoid,
        lambda a: 1 - torch.sigmoid(a),
        lambda a: (1 - torch.sigmoid(a)) * torch.sigmoid(a + 1),
        lambda a: a.clamp(0, 1),
        lambda a: torch.exp(-a.square()),
        lambda a: torch.linspace(0.0, 0.9, 4).expand_as(a),
    ],
)
def test_no_signs_are_written_where_decays_are_never_negative(decay: Decay) -> None:
    assert not has_signs(rewritten(Recurrence(decay)))


@pytest.mark.parametrize(
    "decay",
    [
        torch.tanh,
        lambda a: a,
        lambda a: -torch.sigmoid(a),
        lambda a: torch.linspace(-0.5, 0.9, 4).expand_as(a),
    ],
)
def test_signs_are_written_where_decays_may_be_negative(decay: Decay) -> None:
    assert has_signs(rewritten(Recurrence(decay)))


def test_a_model_that_takes_logarithms_of_its_decays_has_no_signs() -> None:
    class InLogSpace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            total = torch.log(a).cumsum(1)
            return total.exp() * (b * (-total).exp()).cumsum(1)

    assert not has_signs(rewritten(InLogSpace()))


def test_signs_do_not_wear_off() -> None:
    """Decays of -1, 1 and 0 are exact in float32, so that whole numbers stay whole numbers."""
    model = rewritten(Recurrence(lambda a: a))
    session = session_of(model)
    random = np.random.default_rng(0)
    a = random.choice([-1.0, 1.0], (2, 4097, 4)).astype(np.float32)
    a[:, 1000], a[:, 2048:2050] = 0, -0.0
    b = random.integers(-3, 4, a.shape).astype(np.float32)
    expected, h = np.empty_like(b), np.zeros((2, 4), np.float32)
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        expected[:, t] = h
    (state,) = states.find_states(model)
    feeds = {"x": np.concatenate([a, b], -1), state.past: state.start(2)}
    got, present = session.run(None, feeds)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(present.squeeze((2, 3)), h)


def test_the_state_is_that_of_the_recurrence() -> None:
    """Without tokens it stays; a zero forgets it, and a negative decay turns it."""
    model = rewritten(Recurrence(lambda a: a))
    (state,) = states.find_states(model)
    session, past = session_of(model), np.arange(1, 9, dtype=np.float32).reshape(2, 4, 1, 1)

    def after(*decays: float) -> np.ndarray:
        x = np.zeros((2, len(decays), 8), np.float32)
        x[..., :4] = np.reshape(decays, (-1, 1))
        found: np.ndarray = session.run([state.present], {"x": x, state.past: past})[0]
        return found

    np.testing.assert_array_equal(after(), past)
    np.testing.assert_array_equal(after(-1.0), -past)
    np.testing.assert_array_equal(after(-0.5, 1.0, -1.0), past / 2)
    np.testing.assert_array_equal(after(-0.5, -1.0, -1.0), -past / 2)
    np.testing.assert_array_equal(after(-1.0, 0.0, -1.0), 0 * past)
