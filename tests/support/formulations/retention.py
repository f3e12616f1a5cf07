"""Retention with rows of its mask normalised, as the paper and repositories have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.decayed import rates
from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    LONGEST,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
)


def mask_of(length, rate):
    """Powers of rates under a triangle."""
    t = torch.arange(length)
    return (rate[:, None, None] ** (t[:, None] - t).clamp(min=0)).tril()


def over_sums(scores):
    """Scores over the larger of 1 and the magnitude of their sum."""
    return scores / scores.detach().sum(-1, keepdim=True).abs().clamp(min=1)


@formulation(COLLECTED)
def row_normalised_mask(q, k, v):
    """RetNet as published: rows of the mask divided by the root of their sum."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    decay = mask_of(q.shape[2], rates())
    decay = decay / decay.sum(-1, keepdim=True).sqrt()
    return merge((q @ k.transpose(-1, -2) * D**-0.5 * decay) @ v)


@formulation(COLLECTED, nodes=2)
def retnet_as_published(q, k, v):
    """Rows of the mask normalised, and the result divided by max(|sum|, 1)."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    decay = mask_of(q.shape[2], rates())
    decay = decay / decay.sum(-1, keepdim=True).sqrt()
    return merge(over_sums(q @ k.transpose(-1, -2) * decay) @ v)


@formulation(COLLECTED)
def row_normalised_without_decay(q, k, v):
    """A mask of ones: rows are divided by the root of their length."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    mask = torch.ones(q.shape[2], q.shape[2]).tril()
    mask = mask / mask.sum(-1, keepdim=True).sqrt()
    return merge((q @ k.transpose(-1, -2) * mask) @ v)


@formulation(COLLECTED)
def mean_by_a_mask(q, k, v):
    """Rows of ones over their sum: the mean of all values so far."""
    mask = torch.ones(v.shape[1], v.shape[1]).tril()
    return q * ((mask / mask.sum(-1, keepdim=True)) @ v) + k


@formulation(COLLECTED)
def fading_mean(q, k, v):
    """Powers of a rate over their sum, outside of the product."""
    t = torch.arange(v.shape[1])
    mask = (0.9 ** (t[:, None] - t).clamp(min=0)).tril()
    return q * ((mask @ v) / mask.sum(-1)[:, None]) + k


@formulation(COLLECTED, nodes=2)
def one_rate_for_all_heads(q, k, v):
    """A mask without heads, its rows summing to 1."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    t = torch.arange(q.shape[2])
    mask = torch.where(t[:, None] >= t, 0.96 ** (t[:, None] - t), 0.0)
    mask = mask / mask.sum(1, keepdim=True)
    return merge(over_sums(q @ k.transpose(-1, -2) * mask) @ v)


class StoredRows(nn.Module):
    """The mask in a buffer, cut to the length and then normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", mask_of(LONGEST, rates()))

    def forward(self, q, k, v):
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        mask = self.mask[:, : q.shape[2], : q.shape[2]]
        mask = mask / mask.sum(-1, keepdim=True).sqrt()
        return merge(over_sums(q @ k.transpose(-1, -2) * mask) @ v)


formulation(COLLECTED, nodes=2)(StoredRows)


class LearntRows(nn.Module):
    """Rates that were trained, one of them 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(-torch.linspace(0, 0.3, HEADS))

    def forward(self, q, k, v):
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        t = torch.arange(q.shape[2])
        apart = (t[:, None] - t).clamp(min=0).to(v.dtype)
        mask = torch.exp(self.rate.clamp(max=0)[:, None, None] * apart).tril()
        mask = mask / mask.sum(-1, keepdim=True).sqrt()
        return merge((q @ k.transpose(-1, -2) * mask) @ v)


formulation(COLLECTED)(LearntRows)


def rotate_every_two(x):
    pairs = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1)
    return pairs.flatten(-2)


class RelativePositions(nn.Module):
    """torchscale's RetNetRelPos, parallel."""

    def __init__(self) -> None:
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, D // 2))
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())
        decay = torch.log(1 - 2 ** (-5 - torch.arange(HEADS, dtype=torch.float)))
        self.register_buffer("decay", decay)

    def forward(self, slen):
        index = torch.arange(slen).to(self.decay)
        sin = torch.sin(index[:, None] * self.angle[None, :])
        cos = torch.cos(index[:, None] * self.angle[None, :])
        mask = torch.tril(torch.ones(slen, slen).to(self.decay))
        mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
        mask = torch.exp(mask * self.decay[:, None, None])
        mask = torch.nan_to_num(mask)
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        return (sin, cos), mask


class MultiScaleRetention(nn.Module):
    """torchscale's layer, parallel: rotary positions, a gate, a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = D**-0.5
        self.positions = RelativePositions()
        self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)
        )

    def normaliser(self, scores):
        return scores.detach().sum(dim=-1, keepdim=True).abs().clamp(min=1)

    def forward(self, x):
        (sin, cos), mask = self.positions(x.shape[1])
        q, k, v, g = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.g_proj(x)
        k = k * self.scaling
        q, k = (heads_first(y) for y in (q, k))
        qr, kr = (y * cos + rotate_every_two(y) * sin for y in (q, k))
        vr = heads_first(v)
        qk = qr @ kr.transpose(-1, -2) * mask
        output = (qk / self.normaliser(qk)) @ vr
        output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.out_proj(F.silu(g) * merge(output))


formulation(COLLECTED, inputs=1, nodes=2)(MultiScaleRetention)


class SumsOfMagnitudes(MultiScaleRetention):
    """An earlier version of it, whose scores are divided by the sum of their magnitudes."""

    def normaliser(self, scores):
        return scores.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1)


formulation(COLLECTED, inputs=1, streams=False)(SumsOfMagnitudes)


@formulation(COLLECTED, reason="its denominator is not")
def rows_of_a_window(q, k, v):
    """Rows are divided by a sum of eight keys alone."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    decay = mask_of(q.shape[2], rates())
    t = torch.arange(q.shape[2])
    inside = (decay * (t[:, None] - t < 8)).sum(-1, keepdim=True)
    return merge((q @ k.transpose(-1, -2) * decay / inside) @ v)
