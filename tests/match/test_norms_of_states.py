"""Norms that a loop takes of its state for what it gives: after the loop, or the true reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.loops import WIDTH, check_streams, operators, reasons, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")


class Normed(nn.Module):
    """Linear attention with a decay, token by token, of which a norm is taken in each step."""

    def __init__(self, norm: nn.Module, read: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.read = norm, read
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, k, v, g = (p(x) for p in self.projections)
        S, out = torch.zeros(x.shape[0], WIDTH, WIDTH, dtype=x.dtype), []
        for t in range(x.shape[1]):
            S = g[:, t, :, None].sigmoid() * S + k[:, t, :, None] * v[:, t, None]
            out.append(self.read(self.norm, S, q[:, t]))
        return torch.stack(out, 1)


class OfChannels(Normed):
    """The same of one number for each channel."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, _, v, g = (p(x) for p in self.projections)
        h, out = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype), []
        for t in range(x.shape[1]):
            h = g[:, t].sigmoid() * h + v[:, t]
            out.append(self.read(self.norm, h, q[:, t]))
        return torch.stack(out, 1)


def with_own_weights(norm: nn.GroupNorm) -> nn.GroupNorm:
    torch.manual_seed(1)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(
            OfChannels(with_own_weights(nn.GroupNorm(2, WIDTH)), lambda norm, h, q: norm(h) * q),
            id="of a state",
        ),
        pytest.param(OfChannels(nn.GroupNorm(1, WIDTH), lambda norm, h, q: norm(h)), id="of one"),
        pytest.param(
            Normed(
                with_own_weights(nn.GroupNorm(4, WIDTH, eps=1e-2)),
                lambda norm, S, q: norm((q[..., None] * S).sum(1)),
            ),
            id="of what is read",
        ),
    ],
)
def test_a_group_norm_leaves_the_step(module: nn.Module) -> None:
    found = rewritten(module)
    assert operators(found) == ["LinearAttention"]
    check_streams(found, module, limit=1e-5)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH)])
def test_of_a_norm_of_a_whole_state_the_reason_is_true(norm: nn.Module) -> None:
    found = rewritten(Normed(norm, lambda norm, S, q: (q[..., None] * norm(S)).sum(1)))
    assert operators(found) == ["Scan"]
    (reason,) = reasons(found)
    assert "is linear in its state, of which LayerNormalization is computed" in reason
