"""Causal attention as all scores with a triangle over them."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.formulations.notation import (
    CAUSAL,
    EPS,
    LONGEST,
    NORMALISED,
    D,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


@formulation(CAUSAL, **NORMALISED)
def tril_scores(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **NORMALISED)
def normalised_scores(q, k, v):
    """Scores are divided by their sum before they meet the values."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = torch.tril(torch.einsum("bhid,bhjd->bhij", q, k))
    weights = scores / (scores.sum(dim=-1, keepdim=True) + EPS)
    return merge(torch.einsum("bhij,bhjd->bhid", weights, v))


@formulation(CAUSAL, **NORMALISED)
def ones_tril_product(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    length = q.shape[2]
    mask = torch.ones(length, length, device=q.device).tril()
    scores = (q @ k.mT) * mask
    return merge((scores @ v) / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **NORMALISED)
def masked_fill(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    length = q.shape[2]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    scores = (q @ k.transpose(-2, -1)).masked_fill(mask, 0.0)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **NORMALISED)
def where_positions(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    t = torch.arange(q.shape[1], device=q.device)
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    scores = torch.where(t[:, None] >= t[None, :], scores, torch.zeros_like(scores))
    out = torch.einsum("bhts,bshe->bthe", scores, v)
    return (out / (scores.sum(-1).transpose(1, 2).unsqueeze(-1) + EPS)).flatten(2)


class TrilBuffer(nn.Module):
    """The mask is a buffer, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril()[None, None])

    def forward(self, q, k, v):
        q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
        length = q.shape[2]
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:, :, :length, :length] == 0, 0)
        return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


formulation(CAUSAL, **NORMALISED)(TrilBuffer)


@formulation(CAUSAL, normalize=False, scale=1.0, query_map=None)
def plain_unnormalised(q, k, v):
    """No feature map, a scale."""
    q, k, v = heads_first(q) * D**-0.5, heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril() @ v)


@formulation(CAUSAL, nodes=2, normalize=False)
def clamped_denominator(q, k, v):
    """A denominator that is clamped: numerator and denominator are fused one by one."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / scores.sum(-1, keepdim=True).clamp(min=EPS))


@formulation(CAUSAL, query_map="relu", key_map="relu", normalize=True, eps=1e-3)
def matmul_ones(q, k, v):
    """The sum over keys as a product with ones, relu by clamp."""
    q, k, v = (heads_first(x) for x in (q.clamp(min=0), k.clamp(min=0), v))
    length = q.shape[2]
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * torch.ones(length, length).tril()
    den = scores @ torch.ones(1, 1, length, 1)
    return merge(scores @ v / (den + 1e-3))
