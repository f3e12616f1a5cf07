"""Decays that are exactly 0 in places, however the step of a loop writes them, forget the state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linexport.graph import states
from tests.support.loops import WIDTH, check_streams, operators, reasons, rewritten, session_of

pytestmark = pytest.mark.usefixtures("one_thread")

Fade = Callable[[Tensor, Tensor], Tensor]
"""Of a state (B, K, V) and a number u for each channel of the key (B, K, 1)."""

FADES: dict[str, Fade] = {
    "choice of the decay": lambda S, u: torch.where(u > 0, u.sigmoid(), 0.0) * S,
    "choice of the state": lambda S, u: torch.where(u > 0, S, 0.0) * u.sigmoid(),
    "choice of what fades": lambda S, u: torch.where(u > 0, S * u.sigmoid(), torch.zeros_like(S)),
    "zeros first": lambda S, u: S.masked_fill(u < 0, 0.0) * u.sigmoid(),
    "a head that is reset": lambda S, u: S * ~(u[:, :1] > 0) * u.sigmoid(),
    "three factors": lambda S, u: S * (u > -1) * u.sigmoid() * (u < 1),
    "softshrink": lambda S, u: F.softshrink(u) * S,
    "hardtanh": lambda S, u: F.hardtanh(u, 0, 1) * S,
    "relu": lambda S, u: u.tanh().relu() * S,
    "closed or open": lambda S, u: (u > 0).float() * S,
}


class Gated(nn.Module):
    """S_t = fade(S_{t-1}, u_t) + k_t v_t^T, read by q_t."""

    def __init__(self, fade: Fade) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fade = fade
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, k, v, u = (p(x)[..., None] for p in self.projections)
        S, out = torch.zeros(x.shape[0], WIDTH, WIDTH, dtype=x.dtype), []
        for t in range(x.shape[1]):
            S = self.fade(S, u[:, t]) + k[:, t] * v[:, t].mT
            out.append((q[:, t] * S).sum(1))
        return torch.stack(out, 1)


IN_EVERY_RUN = {"choice of what fades", "a head that is reset", "three factors", "relu"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in FADES],
)
def test_it_is_fused_and_streams(name: str) -> None:
    module = Gated(FADES[name])
    found = rewritten(module)
    assert operators(found) == ["LinearAttention"]
    check_streams(found, module)


def test_a_closed_gate_forgets_exactly() -> None:
    """Nothing of the state is left by a decay of 0, however large it was."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """h_t = where(c_t, h_{t-1}, 0) a_t + b_t of c, a and b side by side."""
            c, a, b = x.split([2, 3, 3], -1)
            h, out = torch.zeros_like(b[:, 0]), []
            for t in range(x.shape[1]):
                h = torch.where(c[:, t, :1] > 0, h, 0.0) * a[:, t] + b[:, t]
                out.append(h)
            return torch.stack(out, 1)

    found = rewritten(Own())
    assert operators(found) == ["LinearAttention"]
    (state,) = states.find_states(found.model)
    session = session_of(found.model)
    x = np.ones((1, 200, WIDTH), np.float32)
    x[..., 5:] = np.arange(200, dtype=np.float32)[:, None]
    x[:, [70, 128], :2] = -1
    past = np.full([1, *state.shape[1:]], 1e30, np.float32)
    y, _ = session.run(None, {"x": x, state.past: past})
    expected = np.cumsum(np.arange(200))
    np.testing.assert_array_equal(y[0, 70:128, 0], expected[70:128] - expected[69])
    np.testing.assert_array_equal(y[0, 128:, 0], expected[128:] - expected[127])


def test_of_a_decay_for_each_entry_the_reason_is_true() -> None:
    module = Gated(lambda S, u: S * u.sigmoid() * u.sigmoid().mT)
    found = rewritten(module)
    assert not found.findings.matches
    (reason,) = reasons(found)
    assert "product of 2 tensors" in reason and "each channel of its keys" in reason
