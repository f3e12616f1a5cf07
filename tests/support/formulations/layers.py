"""The parts of a layer around attention: heads that are shared, rotary positions, projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.formulations.notation import (
    CAUSAL,
    EPS,
    HEADS,
    NORMALISED,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    phi,
)


@formulation(CAUSAL, **NORMALISED)
def flat_batch_heads(q, k, v):
    """Batch and heads in one dim, bmm."""
    batch, length, _ = q.shape
    q, k, v = (
        x.view(batch, length, HEADS, D).transpose(1, 2).reshape(batch * HEADS, length, D)
        for x in (phi(q), phi(k), v)
    )
    scores = torch.bmm(q, k.transpose(1, 2)).tril()
    out = torch.bmm(scores, v) / (scores.sum(-1, keepdim=True) + EPS)
    return out.reshape(batch, HEADS, length, D).transpose(1, 2).reshape(batch, length, WIDTH)


@formulation(CAUSAL, q_num_heads=HEADS, kv_num_heads=1, **NORMALISED)
def multi_query(q, k, v):
    """One key and value head for all."""
    q = phi(heads_first(q))
    k, v = phi(k[..., :D]).unsqueeze(1), v[..., :D].unsqueeze(1)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, q_num_heads=HEADS, kv_num_heads=2, **NORMALISED)
def grouped_query(q, k, v):
    """Half as many key and value heads, repeated."""
    q = phi(heads_first(q))
    k, v = (
        x[..., : WIDTH // 2]
        .unflatten(-1, (HEADS // 2, D))
        .transpose(1, 2)
        .repeat_interleave(2, dim=1)
        for x in (k, v)
    )
    k = phi(k)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (B, H, T, d)."""
    frequency = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    half = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
    return x * angle.cos() + half * angle.sin()


@formulation(CAUSAL, normalize=False)
def rotary(q, k, v):
    q, k, v = rotate(phi(heads_first(q))), rotate(phi(heads_first(k))), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril() @ v)


class Block(nn.Module):
    """Projections with biases, dropout, a residual and a norm around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
        scores = self.dropout((q @ k.transpose(-1, -2)).tril())
        y = scores @ v / (scores.sum(-1, keepdim=True) + EPS)
        return x + self.dropout(self.out(merge(y)))


formulation(CAUSAL, inputs=1, **NORMALISED)(Block)


class MixedCasts(nn.Module):
    """Half precision outside, float32 for the attention."""

    def forward(self, q, k, v):
        dtype = q.dtype
        q, k, v = (heads_first(x.half()) for x in (q, k, v))
        q, k = phi(q.float()), phi(k.float())
        kv = torch.cumsum(k.unsqueeze(-1) * v.float().unsqueeze(-2), 2)
        out = (q.unsqueeze(-2) @ kv).squeeze(-2)
        den = (q * k.cumsum(2)).sum(-1, keepdim=True) + EPS
        return merge((out / den).half()).to(dtype)


formulation(CAUSAL, half=True, normalize=True, eps=EPS)(MixedCasts)
