"""Causal attention as running sums of outer products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.formulations.notation import (
    CAUSAL,
    EPS,
    NORMALISED,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


@formulation(CAUSAL, **NORMALISED)
def cumsum_outer(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
    top = (q.unsqueeze(-2) @ states).squeeze(-2)
    return (top / ((q * k.cumsum(1)).sum(-1, keepdim=True) + EPS)).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def cumsum_einsum(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    kv = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=2)
    z = 1 / (torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(dim=2)) + EPS)
    return merge(torch.einsum("bhnd,bhnde,bhn->bhne", q, kv, z))


@formulation(CAUSAL, **NORMALISED)
def cumsum_column_vectors(q, k, v):
    """Queries as matrices of one column, which an index takes out again."""
    q, k, v = (split(x).permute(1, 0, 2, 3) for x in (phi(q), phi(k), v))
    state = torch.cumsum(v[..., :, None] * k[..., None, :], dim=0)
    over = 1 / ((q * k.cumsum(0)).sum(-1, keepdim=True) + EPS)
    return ((state @ q[..., None])[..., 0] * over).permute(1, 0, 2, 3).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def cumsum_value_first(q, k, v):
    """The state transposed: (e, d), time in front."""
    q, k, v = (split(x).permute(1, 0, 2, 3) for x in (phi(q), phi(k), v))
    state = torch.cumsum(v[..., :, None] * k[..., None, :], dim=0)
    out = (state * q[..., None, :]).sum(-1)
    den = torch.einsum("tbhd,tbhd->tbh", q, torch.cumsum(k, 0)) + EPS
    return (out / den[..., None]).permute(1, 0, 2, 3).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def normaliser_before(q, k, v):
    """Queries are divided first."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    den = (q * torch.cumsum(k, 1)).sum(-1, keepdim=True) + EPS
    q = q / den
    kv = torch.cumsum(torch.einsum("bthd,bthe->bthde", k, v), dim=1)
    return torch.einsum("bthd,bthde->bthe", q, kv).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def ones_column(q, k, v):
    """The normaliser as one more value channel."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    v = F.pad(v, (0, 1), value=1.0)
    kv = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
    out = torch.einsum("bthd,bthde->bthe", q, kv)
    return (out[..., :-1] / (out[..., -1:] + EPS)).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def triangular_product(q, k, v):
    """The cumulative sum as a product with a triangle."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    length = q.shape[1]
    triangle = torch.ones(length, length).tril()
    kv = torch.einsum("ts,bshd,bshe->bthde", triangle, k, v)
    z = torch.einsum("ts,bshd->bthd", triangle, k)
    out = torch.einsum("bthd,bthde->bthe", q, kv)
    return (out / ((q * z).sum(-1, keepdim=True) + EPS)).flatten(2)
