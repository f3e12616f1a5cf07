"""Loops that compute all of a layer in their step: projections, discretisations, quotients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import COLLECTED, HEADS, WIDTH, D, formulation, split


@formulation(COLLECTED)
class ProjectedState(nn.Module):
    """A diagonal state space (S5, real): the state is projected in the step, by a stored matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.randn(12))
        self.into, self.out = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, q, k, v):
        """(B, T, WIDTH)."""
        h, out = torch.zeros(v.shape[0], 12), []
        for t in range(v.shape[1]):
            h = torch.exp(-torch.exp(self.rate)) * h + self.into(v[:, t])
            out.append(F.gelu(self.out(h)) * torch.sigmoid(q[:, t]) + k[:, t])
        return torch.stack(out, 1)


@formulation(COLLECTED)
class ZeroOrderHold(nn.Module):
    """A selective state space with the exact B (exp(d A) - 1) / A, all of it in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(WIDTH, 1))
        self.project = nn.Linear(WIDTH, 8)

    def forward(self, q, k, v):
        """(B, T, WIDTH)."""
        h, out = torch.zeros(v.shape[0], WIDTH, 4), []
        for t in range(v.shape[1]):
            into, read = self.project(q[:, t]).chunk(2, -1)
            a, step = -torch.exp(self.a), F.softplus(k[:, t])[..., None]
            kept = torch.exp(step * a)
            h = kept * h + (kept - 1) / a * into[:, None] * v[:, t, :, None]
            out.append((h * read[:, None]).sum(-1))
        return torch.stack(out, 1)


@formulation(COLLECTED, nodes=2)
def clamped_denominator(q, k, v):
    """Spikes, a stored decay of each channel, and a sum that is clamped before it divides."""
    rate = torch.linspace(0.8, 0.99, HEADS * D).view(1, HEADS, D)
    q, k, v = ((split(x) > 0).float() for x in (q, k, v))
    state, mass = torch.zeros(q.shape[0], HEADS, D, D), torch.zeros(q.shape[0], HEADS, D)
    out = []
    for t in range(q.shape[1]):
        state = state * rate[..., None] + k[:, t, ..., None] * v[:, t, :, None]
        mass = mass * rate + k[:, t]
        above = (q[:, t, :, None, :] @ state).squeeze(-2)
        out.append(above / (q[:, t] * mass).sum(-1, keepdim=True).clamp_min(1e-6))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
class NormInTheStep(nn.Module):
    """What is read is normalised, gated and projected in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(D, eps=1.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, q, k, v):
        """(B, T, WIDTH)."""
        rate = torch.sigmoid(split(v).mean(-1) + 2)
        gate, q, k, v = torch.sigmoid(q), split(q), split(k), split(v)
        state, out = torch.zeros(q.shape[0], HEADS, D, D), []
        for t in range(q.shape[1]):
            state = rate[:, t, :, None, None] * state + k[:, t, ..., None] * v[:, t, :, None]
            read = torch.einsum("bhd,bhde->bhe", q[:, t], state)
            out.append(self.project(self.norm(read).flatten(1) * gate[:, t]))
        return torch.stack(out, 1)
