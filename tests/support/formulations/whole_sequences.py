"""Bidirectional attention: every token sees all others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import (
    BIDIRECTIONAL,
    EPS,
    HEADS,
    NORMALISED,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


@formulation(BIDIRECTIONAL, **NORMALISED)
def matmul_chain(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    out = q @ (k.transpose(-1, -2) @ v)
    den = q @ k.sum(dim=-2, keepdim=True).transpose(-1, -2) + EPS
    return merge(out / den)


@formulation(BIDIRECTIONAL, **NORMALISED)
def einsum_katharopoulos(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = torch.einsum("nshd,nshm->nhmd", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z).contiguous().flatten(2)


@formulation(BIDIRECTIONAL, **NORMALISED)
def loftr(q, k, v):
    """Values over the length, the result times it."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    length = v.size(1)
    v = v / length
    kv = torch.einsum("nshd,nshv->nhdv", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
    return (torch.einsum("nlhd,nhdv,nlh->nlhv", q, kv, z) * length).flatten(2)


@formulation(BIDIRECTIONAL, query_map="relu", key_map="relu", normalize=True, eps=1e-15)
def litemla(q, k, v):
    """Values padded with ones, channels first."""
    q, k, v = (x.transpose(1, 2).unflatten(1, (HEADS, D)) for x in (q, k, v))
    q, k = F.relu(q), F.relu(k)
    v = F.pad(v, (0, 0, 0, 1), mode="constant", value=1)
    out = torch.matmul(torch.matmul(v, k.transpose(-1, -2)), q)
    out = out[:, :, :-1] / (out[:, :, -1:] + 1e-15)
    return out.flatten(1, 2).transpose(1, 2)


@formulation(BIDIRECTIONAL, normalize=False, query_map="softmax_time", key_map="softmax_time")
def double_softmax(q, k, v):
    """Softmax of queries over channels and of keys over positions."""
    q, k, v = heads_first(q).softmax(-1) * D**-0.5, heads_first(k).softmax(-2), heads_first(v)
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    return merge(torch.einsum("bhnd,bhde->bhne", q, context))


@formulation(BIDIRECTIONAL, normalize=False, query_map="relu", key_map="relu")
def quadratic_unnormalised(q, k, v):
    q, k, v = F.relu(heads_first(q)), F.relu(heads_first(k)), heads_first(v)
    return merge((q @ k.mT) @ v) * 0.5


@formulation(BIDIRECTIONAL, normalize=False)
def galerkin(q, k, v):
    """Divided by the length."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(q @ (k.transpose(-1, -2) @ v) / q.shape[2])


class KeyMask(nn.Module):
    """Padded keys are set to zero with the values."""

    def forward(self, q, k, v):
        keep = v[..., :1].abs() > 0.2
        q, k, v = phi(split(q)), phi(split(k)), split(v)
        k = k.masked_fill(~keep.unsqueeze(-1), 0.0)
        kv = torch.einsum("nshd,nshm->nhmd", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z).flatten(2)


formulation(BIDIRECTIONAL, normalize=True, eps=EPS, query_map="elu1")(KeyMask)


@formulation(BIDIRECTIONAL, masked=True, **NORMALISED)
def score_mask(q, k, v):
    """Padded keys are masked in the scores."""
    keep = v[..., 0] > -1
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None, :], 0.0)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(BIDIRECTIONAL, inputs=1, **NORMALISED)
class SharedProjection(nn.Module):
    """One projection to (3, H, d), unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = phi(q), phi(k)
        out = q @ (k.transpose(-1, -2) @ v) / ((q * k.sum(2, keepdim=True)).sum(-1, True) + EPS)
        return self.out(merge(out))


@formulation(BIDIRECTIONAL, **NORMALISED)
def single_loop(q, k, v):
    """Products and sums only."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = (k.unsqueeze(-1) * v.unsqueeze(-2)).sum(1, keepdim=True)
    out = (q.unsqueeze(-1) * kv).sum(-2)
    return (out / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + EPS)).flatten(2)
