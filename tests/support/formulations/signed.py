"""Recurrences whose decays may be negative, or are: of either sign, and exactly 0 as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    split,
)


def scanned(a, b, h=None):
    """h_t = a_t h_{t-1} + b_t along dimension 1."""
    h, out = torch.zeros_like(b[:, 0]) if h is None else h, []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        out.append(h)
    return torch.stack(out, 1)


@formulation(COLLECTED)
def signed_recurrence(q, k, v):
    """minGRU with signed transitions (Grazzi et al. 2025): the decay is tanh."""
    return q + scanned(torch.tanh(k), torch.sigmoid(q) * v)


@formulation(COLLECTED)
def decays_that_reach_zero(q, k, v):
    """Between -1 and 1, with exact zeros in every sequence: what was before is forgotten."""
    return q + scanned(F.softshrink(torch.tanh(k), 0.3), v)


@formulation(COLLECTED)
def decays_below_zero(q, k, v):
    """Every decay is negative."""
    return q * scanned(-torch.sigmoid(k), v)


@formulation(COLLECTED)
def stored_rates_of_either_sign(q, k, v):
    """A real diagonal state space, whose rates alternate."""
    rates = torch.linspace(-0.95, 0.9, WIDTH)
    h, out = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        h = rates * h + k[:, t] * v[:, t]
        out.append(h)
    return torch.stack(out, 1) * q


@formulation(COLLECTED)
def powers_of_negative_rates(q, k, v):
    """Powers under a triangle: whole powers of numbers of either sign."""
    t = torch.arange(v.shape[1])
    past = (t[:, None] - t)[..., None]
    rates = torch.linspace(-0.95, 0.9, WIDTH)
    weights = torch.where(past >= 0, rates ** past.clamp(min=0).float(), 0.0)
    return q + torch.einsum("tsd,bsd->btd", weights, v)


@formulation(COLLECTED)
class SignedFromAState(nn.Module):
    """It begins with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, q, k, v):
        """(B, T, WIDTH)."""
        return q + scanned(torch.tanh(k), v, self.first.expand(v.shape[0], -1))


@formulation(COLLECTED)
def signed_decay_of_heads(q, k, v):
    """A state of keys and values for each head, with one decay."""
    rate = torch.tanh(split(q + v).mean(-1) * 3)
    q, k, v = split(q), split(k), split(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        state = rate[:, t, :, None, None] * state + k[:, t, ..., None] * v[:, t, :, None]
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def signed_decay_of_channels(q, k, v):
    """A decay of its own for each channel of the keys."""
    rate = torch.tanh(heads_first(q - v))
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[2]):
        state = rate[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, None] @ state).squeeze(-2))
    return merge(torch.stack(out, -2))


@formulation(COLLECTED)
def signed_decay_read_before_writing(q, k, v):
    """The state of the token before is read."""
    rate = torch.tanh(split(q + v).mean(-1) * 3)
    q, k, v = split(q), split(k), split(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
        state = rate[:, t, :, None, None] * state + k[:, t, ..., None] * v[:, t, :, None]
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def signed_decay_of_shared_heads(q, k, v):
    """Two queries for each key and value, which have one decay."""
    q = q.unflatten(-1, (HEADS, D)).unflatten(2, (2, 2))
    k, v = (x[..., : 2 * D].unflatten(-1, (2, D)) for x in (k, v))
    rate = torch.tanh(3 * k.mean(-1))
    state, out = torch.zeros(q.shape[0], 2, D, D), []
    for t in range(q.shape[1]):
        state = rate[:, t, :, None, None] * state + k[:, t, ..., None] * v[:, t, :, None]
        out.append(torch.einsum("bhgd,bhde->bhge", q[:, t], state))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def signed_decay_over_a_sum(q, k, v):
    """Divided by a sum with the same decays, which may vanish but for what is added."""
    rate, q = torch.tanh(split(q + v).mean(-1) * 3)[..., None], torch.sigmoid(split(q))
    k, v = torch.sigmoid(split(k)), split(v)
    state, total, out = torch.zeros(q.shape[0], HEADS, D, D), torch.zeros_like(q[:, 0]), []
    for t in range(q.shape[1]):
        state = rate[:, t, ..., None] * state + k[:, t, ..., None] * v[:, t, :, None]
        total = rate[:, t] * total + k[:, t]
        below = (q[:, t] * total).sum(-1, keepdim=True) + 30.0
        out.append((q[:, t, ..., None] * state).sum(-2) / below)
    return torch.stack(out, 1).flatten(2)
