"""Sums over earlier tokens without the token itself, over later ones, and shifts by a token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.formulations.notation import (
    COLLECTED,
    EPS,
    HEADS,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


def shifted(x: Tensor, dim: int = 1) -> Tensor:
    """x_{t-1}, zeros before the first token."""
    x = x.transpose(dim, -1)
    return F.pad(x, (1, 0))[..., :-1].transpose(dim, -1)


@formulation(COLLECTED)
def strictly_causal(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril(-1)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(COLLECTED)
def strictly_causal_unnormalised(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril(diagonal=-1) @ v)


@formulation(COLLECTED)
def exclusive_sum_by_difference(q, k, v):
    """cumsum(x) - x."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = torch.einsum("bshd,bshe->bshde", k, v)
    before = kv.cumsum(1) - kv
    return torch.einsum("bshd,bshde->bshe", q, before).flatten(2)


@formulation(COLLECTED)
def exclusive_sum_by_padding(q, k, v):
    """The running sum, a zero in front and the last one left out."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
    before = F.pad(kv, (0, 0, 0, 0, 0, 0, 1, -1))
    return torch.einsum("bshd,bshde->bshe", q, before).flatten(2)


@formulation(COLLECTED)
def exclusive_sum_by_concatenation(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
    before = torch.cat([torch.zeros_like(kv[:, :1]), kv[:, :-1]], 1)
    return torch.einsum("bshd,bshde->bshe", q, before).flatten(2)


@formulation(COLLECTED)
def exclusive_mean(q, k, v):
    """The mean of earlier tokens."""
    count = torch.arange(v.shape[1]).clamp(min=1).view(1, -1, 1)
    return (v.cumsum(1) - v) / count + q * k


@formulation(COLLECTED)
def current_token_apart(q, k, v):
    """RWKV-6: earlier tokens with the state, the token itself with a bonus."""
    bonus = torch.linspace(0.1, 0.9, HEADS)[:, None, None]
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril(-1)
    own = (q * bonus * k).sum(-1, keepdim=True)
    return merge(scores @ v + own * v)


@formulation(COLLECTED)
def exclusive_decay(q, k, v):
    """Decays of a gated state that is read before the token is written."""
    total = F.logsigmoid(split(q).sum(-1)).transpose(1, 2).cumsum(-1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    apart = (total[..., :, None] - total[..., None, :]).exp()
    return merge((q @ k.transpose(-1, -2) * apart.tril(-1)) @ v)


LAG = 3


def late(x: Tensor, dim: int = 1) -> Tensor:
    """x_{t-3}, zeros before the first token."""
    x = x.transpose(dim, -1)
    return F.pad(x, (LAG, 0))[..., : x.shape[-1]].transpose(dim, -1)


def distances(x: Tensor, dim: int) -> Tensor:
    """How many tokens each key (columns) is before each query."""
    places = torch.arange(x.shape[dim])
    return places[:, None] - places


@formulation(COLLECTED)
def shifted_triangle(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril(-LAG)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(COLLECTED)
def shifted_triangle_by_distances(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).masked_fill(distances(q, 2) < LAG, 0.0)
    return merge(scores @ v)


@formulation(COLLECTED)
def shifted_sums(q, k, v):
    """The running sums of k v and of k, as they were some tokens before."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    state = late(torch.einsum("bshd,bshe->bshde", k, v).cumsum(1))
    weight = torch.einsum("bshd,bshd->bsh", q, late(k.cumsum(1)))
    return (torch.einsum("bshd,bshde->bshe", q, state) / (weight[..., None] + EPS)).flatten(2)


@formulation(COLLECTED)
def shifted_sums_by_concatenation(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    state = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
    zeros = torch.zeros_like(state[:, :1]).expand(-1, LAG, -1, -1, -1)
    state = torch.cat([zeros, state], 1)[:, : q.shape[1]]
    return torch.einsum("bshd,bshde->bshe", q, state).flatten(2)


@formulation(COLLECTED)
def shifted_retention(q, k, v):
    """A constant decay from each key to a query that does not see the last ones."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    behind = distances(q, 2)
    rates = torch.linspace(0.9, 0.99, HEADS)[:, None, None]
    decay = rates ** behind.clamp(min=0) * (behind >= LAG)
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


@formulation(COLLECTED)
def shifted_decays(q, k, v):
    """Decays of data, those of the last tokens among them."""
    total = F.logsigmoid(split(q).sum(-1)).transpose(1, 2).cumsum(-1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    apart = (total[..., :, None] - total[..., None, :]).exp()
    return merge((q @ k.transpose(-1, -2) * apart.tril(-LAG)) @ v)


@formulation(COLLECTED)
def shifted_mean(q, k, v):
    """A sum by a triangle, and a count by another."""
    old = torch.ones(v.shape[1], v.shape[1]).tril(-LAG)
    return old @ v / (old.sum(-1, keepdim=True) + 1) + q * k


@formulation(COLLECTED)
def token_shift(q, k, v):
    """RWKV: keys mixed with those of the token before."""
    k = 0.5 * k + 0.5 * shifted(k)
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(COLLECTED)
def token_shift_by_concatenation(q, k, v):
    """RWKV with torch.cat."""
    k = k + torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril() @ v)


@formulation(COLLECTED)
def convolved_keys(q, k, v):
    """A short causal convolution before the attention, padded on both sides and cut."""
    weight = torch.linspace(-0.5, 0.5, 4 * k.shape[-1]).view(k.shape[-1], 1, 4)
    k = F.conv1d(k.transpose(1, 2), weight, padding=3, groups=k.shape[-1])[..., : k.shape[1]]
    q, k, v = phi(heads_first(q)), phi(heads_first(k.transpose(1, 2))), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril() @ v)


@formulation(COLLECTED, streams=False)
def suffix_sum(q, k, v):
    """Sums of this and all later tokens: total minus the exclusive sum."""
    return q * (v.sum(1, keepdim=True) - v.cumsum(1) + v) + k


@formulation(COLLECTED, streams=False)
def suffix_sum_by_flips(q, k, v):
    return q * v.flip(1).cumsum(1).flip(1) + k


@formulation(COLLECTED, streams=False)
def anticausal(q, k, v):
    """The other triangle."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).triu()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(COLLECTED, streams=False)
def flipped_attention(q, k, v):
    """Attention that runs backwards by flips around a causal one."""
    q, k, v = (phi(heads_first(x.flip(1))) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS)).flip(1)


@formulation(COLLECTED, nodes=2, streams=False)
def both_directions(q, k, v):
    """One attention forwards, one backwards, as bidirectional Mamba has it."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = q @ k.transpose(-1, -2)
    return merge(scores.tril() @ v + (scores.triu() * 0.5) @ v)
