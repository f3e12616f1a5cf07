"""Attention that is not linear, and sums that are no attention: these stay as they are."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import EPS, OTHER, D, formulation, heads_first, merge, phi


@formulation(OTHER)
def softmax(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v)


@formulation(OTHER)
def causal_softmax(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    length = q.shape[2]
    mask = torch.full((length, length), float("-inf")).triu(1)
    return merge((q @ k.transpose(-1, -2) * D**-0.5 + mask).softmax(-1) @ v)


@formulation(OTHER)
def scaled_dot_product(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@formulation(OTHER)
def softmax_by_hand(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    length = q.shape[2]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(later, float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return merge(weights @ v / weights.sum(-1, keepdim=True))


@formulation(OTHER)
def exp_scores(q, k, v):
    """softmax without its maximum."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    weights = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(D)).tril()
    return merge(weights @ v / weights.sum(-1, keepdim=True))


@formulation(OTHER)
def relu_scores(q, k, v):
    """A function of the scores."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(F.relu(q @ k.transpose(-1, -2)).tril() @ v)


@formulation(OTHER)
def matrix_chain(q, k, v):
    """Three matrices, no attention."""
    return q @ (k.transpose(-1, -2) @ v)


@formulation(OTHER)
def window(q, k, v):
    """A band is no triangle."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril().triu(-4)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


class RandomMask(nn.Module):
    """A constant mask that is no triangle."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5).float()
        self.register_buffer("mask", mask)

    def forward(self, q, k, v):
        q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
        length = q.shape[2]
        return merge((q @ k.transpose(-1, -2) * self.mask[:length, :length]) @ v)


formulation(OTHER)(RandomMask)
