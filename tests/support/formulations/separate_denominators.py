"""Numerator and denominator that stay two attentions."""

from __future__ import annotations

import torch

from tests.support.formulations.notation import (
    ELU,
    EPS,
    SEPARATE,
    formulation,
    heads_first,
    merge,
    phi,
)


@formulation(SEPARATE, nodes=2, **ELU | {"normalize": False})
def clamped_weights(q, k, v):
    """Divided before the values, by a denominator that is no sum: a factor of every query."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge((scores / scores.sum(-1, keepdim=True).clamp_min(EPS)) @ v)


@formulation(SEPARATE, nodes=2, **ELU | {"normalize": False})
def clamped_einsum(q, k, v):
    """The same as one product of three, as cosFormer has it."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    kv = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
    over = 1 / torch.clamp_min(torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2)), EPS)
    return merge(torch.einsum("bhsd,bhsde,bhs->bhse", q, kv, over))
