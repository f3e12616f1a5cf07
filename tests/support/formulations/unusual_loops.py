"""Loops over tokens and chunks whose parts are put together in unusual places."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.formulations.decayed import segsum
from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    D,
    formulation,
    heads_first,
    merge,
    split,
)


@formulation(COLLECTED)
def fast_weights_of_rolled_features(q, k, v):
    """DPFP: torch writes ``roll`` as slices whose shapes it does not state."""

    def features(x):
        x = torch.cat([F.relu(x), F.relu(-x)], -1)
        x = x * x.roll(1, -1)
        return x / (x.sum(-1, keepdim=True) + 1e-5)

    beta = torch.sigmoid(split(v).mean(-1, keepdim=True))
    q, k, v = features(split(q)), features(split(k)), split(v)
    state, out = q.new_zeros(q.shape[0], HEADS, 2 * D, D), []
    for t in range(q.shape[1]):
        old = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t] * (v[:, t] - old))
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED, length=64)
def loop_over_states_of_chunks(q, k, v):
    """Mamba-2: what a chunk adds is known before the loop, its decay is read in it."""
    q, k, v = (split(x).unflatten(1, (-1, 16)) for x in (q, k, v))
    steps = -F.softplus(q.mean(-1)).permute(0, 3, 1, 2)
    since = steps.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", q, k, torch.exp(segsum(steps)), v)
    left = torch.exp(since[..., -1:] - since)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", k, left, v)
    h, before = torch.zeros_like(states[:, 0]), []
    for c in range(states.shape[1]):
        before.append(h)
        h = h * since[:, :, c, -1].exp()[..., None, None] + states[:, c]
    earlier = torch.stack(before, 1)
    between = torch.einsum("bclhn,bchpn,bhcl->bclhp", q, earlier, torch.exp(since))
    return (within + between).flatten(1, 2).flatten(2)


@formulation(COLLECTED, length=64)
def loop_over_decays_of_chunks(q, k, v):
    """GLA: the decay of a chunk is the sum of its tokens', of which exp is taken per channel."""
    g = F.logsigmoid(split(q)) / 4
    q, k, v, g = (
        x.unflatten(1, (-1, 16)).permute(0, 3, 1, 2, 4) for x in (*map(split, (q, k, v)), g)
    )
    total = g.cumsum(-2)
    last = total[..., -1:, :]
    query, ends = q * total.exp(), k * (last - total).exp()
    later = torch.ones(16, 16, dtype=torch.bool).triu(1)
    within = (query @ (k * (-total).exp()).mT).masked_fill(later, 0) @ v
    state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[2]):
        out.append(query[:, :, n] @ state)
        state = last[:, :, n].exp().mT * state + ends[:, :, n].mT @ v[:, :, n]
    return merge((within + torch.stack(out, 2)).flatten(2, 3))


@formulation(COLLECTED, length=64)
def concatenated_chunks_of_transposed_heads(q, k, v):
    """torch states the chunk of a transposed tensor as T // (T // 16)."""
    q, k, v = map(heads_first, (q, k, v))
    count = q.shape[2] // 16
    q, k, v = (x.reshape(x.shape[0], HEADS, count, 16, D) for x in (q, k, v))
    state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(count):
        scores = (q[:, :, n] @ k[:, :, n].mT).tril()
        out.append(q[:, :, n] @ state + scores @ v[:, :, n])
        state = state + k[:, :, n].mT @ v[:, :, n]
    return merge(torch.cat(out, 2))


@formulation(COLLECTED)
def slices_of_one_token(q, k, v):
    """RWKV-5: tokens are read and written as slices of one."""
    rate = torch.linspace(0.8, 0.95, HEADS)[:, None, None]
    q, k, v = map(heads_first, (q, k, v))
    state, out = torch.zeros(q.shape[0], HEADS, D, D), torch.empty_like(v)
    for t in range(q.shape[2]):
        new = k[:, :, t : t + 1].mT @ v[:, :, t : t + 1]
        out[:, :, t : t + 1] = q[:, :, t : t + 1] @ (0.5 * new + state)
        state = new + rate * state
    return merge(out)
