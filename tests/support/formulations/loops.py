"""Recurrences as Python loops over tokens."""

from __future__ import annotations

import torch
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


@formulation(COLLECTED)
def loop_that_writes(q, k, v):
    """Each step is written into a tensor that was there before the loop."""
    h, out = torch.zeros_like(v[:, 0]), torch.zeros_like(v)
    for t in range(v.shape[1]):
        h = torch.sigmoid(k[:, t]) * h + v[:, t]
        out[:, t] = h * q[:, t]
    return out


@formulation(COLLECTED)
def gated_loop_read_before_writing(q, k, v):
    """The state of the token before is read; it then fades by a gate of each head."""
    rate = torch.sigmoid(split(q).mean(-1) + 2)
    q, k, v = split(q), split(k), split(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
        state = rate[:, t, :, None, None] * state + torch.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def channels_read_before_writing(q, k, v):
    """The same with a gate of each channel."""
    rate = torch.exp(-torch.exp(split(q)))
    q, k, v = split(q), split(k), split(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        out.append((q[:, t, :, :, None] * state).sum(-2))
        state = rate[:, t, ..., None] * state + k[:, t, ..., None] * v[:, t, :, None]
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def stored_rates_read_before_writing(q, k, v):
    """The same with a stored rate of each head, so that a faded state is one of the loop's."""
    rate = torch.linspace(0.8, 0.95, HEADS)[:, None, None]
    q, k, v = split(q), split(k), split(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        out.append((q[:, t, :, :, None] * state).sum(-2))
        state = rate * state + k[:, t, ..., None] * v[:, t, :, None]
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
class Rwkv6Loop(nn.Module):
    """The newest key and value weighed by u, beside the state of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(HEADS, D))

    def forward(self, q, k, v):
        """(B, T, WIDTH)."""
        rate = torch.exp(-torch.exp(split(q + v)))
        q, k, v = split(q), split(k), split(v)
        state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
        for t in range(q.shape[1]):
            pair = k[:, t, ..., None] * v[:, t, :, None]
            out.append((q[:, t, ..., None] * (state + self.u[..., None] * pair)).sum(-2))
            state = state * rate[:, t, ..., None] + pair
        return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def rwkv5_loop(q, k, v):
    """Tokens as slices, and products of matrices; the bonus and the rates are of each channel."""
    r, k, v = heads_first(q), heads_first(k).mT, heads_first(v)
    bonus = torch.linspace(-1, 2, HEADS * D).view(HEADS, D, 1)
    rate = torch.exp(-torch.exp(torch.linspace(-3, 0, HEADS * D))).view(HEADS, D, 1)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        pair = k[:, :, :, t : t + 1] @ v[:, :, t : t + 1]
        out.append((r[:, :, t : t + 1] @ (bonus * pair + state)).squeeze(2))
        state = pair + rate * state
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def delta_rule_by_matrices(q, k, v):
    """A delta rule whose state is multiplied with 1 - beta k k^T, of columns."""
    share = torch.sigmoid(split(q).mean(-1))[..., None, None]
    q, k, v = (split(x)[..., None] for x in (q, k, v))
    k = nn.functional.normalize(k, dim=-2)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        beta, key = share[:, t], k[:, t]
        state = state @ (torch.eye(D) - beta * key @ key.mT) + beta * v[:, t] @ key.mT
        out.append((state @ q[:, t]).squeeze(-1))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def gla_loop(q, k, v):
    """GLA by tokens: the exponential of the gate is taken in the loop."""
    rate = torch.nn.functional.logsigmoid(heads_first(v)) / 16
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), torch.empty_like(v)
    for t in range(q.shape[2]):
        state = state * rate[:, :, t].exp()[..., None] + k[:, :, t, :, None] * v[:, :, t, None, :]
        out[:, :, t] = (q[:, :, t, :, None] * state).sum(-2) * D**-0.5
    return merge(out)


@formulation(COLLECTED)
def hgrn2_loop(q, k, v):
    """HGRN2 by tokens: 1 - f is the key."""
    rate = 0.5 + 0.5 * torch.sigmoid(heads_first(k))
    q, v = heads_first(q), heads_first(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[2]):
        fade = rate[:, :, t, :, None]
        state = fade * state + (1 - fade) * v[:, :, t, None, :]
        out.append((q[:, :, t, None] @ state).squeeze(-2))
    return merge(torch.stack(out, -2))


@formulation(COLLECTED)
def loop_over_unbound_tokens(q, k, v):
    """zip of tokens, put together by cat."""
    h, out = v.new_zeros(v.shape[0], WIDTH), []
    for a, b in zip(k.unbind(1), v.unbind(1), strict=True):
        h = 0.9 * h + torch.tanh(a) * b
        out.append(h.unsqueeze(1))
    return torch.cat(out, dim=1) + q


@formulation(COLLECTED)
def loop_of_outer_products(q, k, v):
    """Linear attention token by token, its state a matrix."""
    q, k, v = split(q), split(k), split(v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, dim=1).flatten(2)


@formulation(COLLECTED)
def loop_with_the_tokens_last(q, k, v):
    """(B, H, T, d), a decay of each head."""
    q, k, v = (split(x).transpose(1, 2) for x in (q, k, v))
    rate = torch.linspace(0.8, 0.95, HEADS)[:, None, None]
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[2]):
        state = rate * state + k[:, :, t].unsqueeze(-1) @ v[:, :, t].unsqueeze(-2)
        out.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return merge(torch.stack(out, dim=2))


class SequentialMamba(nn.Module):
    """Mamba's scan token by token: a decay for each channel and entry of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.arange(1, 5).float().log().repeat(WIDTH, 1))
        self.project = nn.Linear(WIDTH, 8)

    def forward(self, q, k, v):
        delta = nn.functional.softplus(k)
        into, read = self.project(q).chunk(2, -1)
        decay = torch.exp(delta.unsqueeze(-1) * -self.rate.exp())
        added = delta.unsqueeze(-1) * into.unsqueeze(2) * v.unsqueeze(-1)
        h, out = torch.zeros(v.shape[0], WIDTH, 4), []
        for t in range(v.shape[1]):
            h = decay[:, t] * h + added[:, t]
            out.append(h)
        return (torch.stack(out, 1) @ read.unsqueeze(-1)).squeeze(3)


formulation(COLLECTED)(SequentialMamba)


@formulation(COLLECTED)
class SelectiveScanReference(SequentialMamba):
    """mamba-ssm's reference as people copy it: read in the loop, and asked for the last state."""

    def forward(self, q, k, v):
        """(B, T, WIDTH)."""
        u, delta, rate = v.mT, nn.functional.softplus(k).mT, -self.rate.exp()
        into, read = self.project(q).mT.chunk(2, 1)
        decay = torch.exp(torch.einsum("bdl,dn->bdln", delta, rate))
        added = torch.einsum("bdl,bnl,bdl->bdln", delta, into, u)
        h, out, last = rate.new_zeros(u.shape[0], *rate.shape), [], None
        for i in range(u.shape[2]):
            h = decay[:, :, i] * h + added[:, :, i]
            out.append(torch.einsum("bdn,bn->bd", h, read[:, :, i]))
            if i == u.shape[2] - 1:
                last = h
        assert last is not None
        return torch.stack(out, 2).mT


@formulation(COLLECTED)
def loop_from_the_second_token(q, k, v):
    """The first state is not zero, but the first token."""
    h = v[:, 0]
    out = [h]
    for t in range(1, v.shape[1]):
        h = torch.sigmoid(k[:, t]) * h + v[:, t]
        out.append(h)
    return torch.stack(out, 1) * q


@formulation(COLLECTED, reason="A Python loop over tokens")
def loop_of_two_kinds_of_steps(q, k, v):
    """Every second step is another one."""
    h, out = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        h = torch.sigmoid(k[:, t]) * h + v[:, t] if t % 2 else torch.tanh(h) + q[:, t]
        out.append(h)
    return torch.stack(out, 1)


@formulation(COLLECTED, reason="A Python loop over tokens")
def loop_that_looks_far_back(q, k, v):
    """A step reads the state of three steps before."""
    states = [torch.zeros_like(v[:, 0])] * 3
    for t in range(v.shape[1]):
        states.append(torch.sigmoid(k[:, t]) * states[-3] + v[:, t])
    return torch.stack(states[3:], 1) + q
