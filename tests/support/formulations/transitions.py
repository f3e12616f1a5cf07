"""Loops whose state is corrected by what a vector of its own reads: no delta rule of ONNX."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.formulations.notation import COLLECTED, HEADS, D, formulation, split


def state_of(x):
    return x.new_zeros(x.shape[0], HEADS, D, D)


@formulation(COLLECTED)
def rwkv7(q, k, v):
    """The transposed state is multiplied with diag(w) + a b^T."""
    w = torch.exp(-0.6 * torch.sigmoid(split(q + k)))
    share, kappa = torch.sigmoid(split(v)), F.normalize(split(k + v), dim=-1)
    q, k, v = split(q), split(k), split(v)
    state, out = state_of(q), []
    for t in range(q.shape[1]):
        ab = -kappa[:, t, ..., None] @ (kappa[:, t] * share[:, t]).unsqueeze(-2)
        vk = v[:, t, ..., None] @ k[:, t].unsqueeze(-2)
        state = state * w[:, t].unsqueeze(-2) + state @ ab + vk
        out.append((state @ q[:, t, ..., None]).squeeze(-1))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def gradient_with_forgetting(q, k, v):
    """Titans without momentum: the gradient is that at the memory before it fades."""
    alpha, theta = (torch.sigmoid(split(x).mean(-1))[..., None, None] for x in (q, v))
    q, k, v = split(q), F.normalize(split(k), dim=-1), split(v)
    state, out = state_of(q), []
    for t in range(q.shape[1]):
        error = torch.einsum("bhk,bhkv->bhv", k[:, t], state) - v[:, t]
        gradient = torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        state = (1 - alpha[:, t]) * state - theta[:, t] * gradient
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def correction_without_fading(q, k, v):
    """Another vector reads the state than the one along which it is corrected."""
    other = F.normalize(split(q + v), dim=-1)
    q, k, v = split(q), F.normalize(split(k), dim=-1), split(v)
    state, out = state_of(q), []
    for t in range(q.shape[1]):
        found = (state * other[:, t, ..., None]).sum(-2)
        state = state - 0.5 * k[:, t, ..., None] * found.unsqueeze(-2)
        state = state + 2 * k[:, t, ..., None] * v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED, reason="may be negative, such as a decay of both signs")
def transition_that_changes_signs(q, k, v):
    """A rate below 0 has no logarithm: this stays a loop."""
    rate, other = torch.tanh(split(q)), F.normalize(split(q + v), dim=-1)
    q, k, v = split(q), F.normalize(split(k), dim=-1), split(v)
    state, out = state_of(q), []
    for t in range(q.shape[1]):
        found = (state * other[:, t, ..., None]).sum(-2)
        state = rate[:, t, ..., None] * state + k[:, t, ..., None] * (v[:, t] - found).unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def transition_read_before_writing(q, k, v):
    """The state of the token before is read."""
    rate, other = torch.sigmoid(split(q)), F.normalize(split(q + v), dim=-1)
    q, k, v = split(q), F.normalize(split(k), dim=-1), split(v)
    state, out = state_of(q), []
    for t in range(q.shape[1]):
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
        found = (state * other[:, t, ..., None]).sum(-2)
        state = rate[:, t, ..., None] * state + k[:, t, ..., None] * (v[:, t] - found).unsqueeze(-2)
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED, reason="Scan")
def two_corrections(q, k, v):
    """Two vectors read the state: it stays a loop."""
    other = F.normalize(split(q + v), dim=-1)
    q, k, v = split(q), F.normalize(split(k), dim=-1), split(v)
    state, out = state_of(q), []
    for t in range(q.shape[1]):
        first, second = ((state * x[:, t, ..., None]).sum(-2) for x in (other, k))
        added = k[:, t, ..., None] * (v[:, t] - first).unsqueeze(-2)
        state = 0.9 * state + added - 0.3 * other[:, t, ..., None] * second.unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1).flatten(2)
