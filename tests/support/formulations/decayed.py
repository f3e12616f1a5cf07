"""Decays as papers and repositories write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.layers import rotate
from tests.support.formulations.notation import (
    COLLECTED,
    EPS,
    HEADS,
    LONGEST,
    WIDTH,
    formulation,
    heads_first,
    merge,
    split,
)


def rates() -> torch.Tensor:
    return 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float32))


@formulation(COLLECTED)
def power_of_clamped_distance(q, k, v):
    """gamma ** (i - j).clamp(min=0) under a triangle."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    t = torch.arange(q.shape[2])
    apart = (t[:, None] - t[None]).clamp(min=0)
    decay = (rates()[:, None, None] ** apart).tril()
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


@formulation(COLLECTED)
def power_of_rectified_distance(q, k, v):
    """Relu of whole numbers, for which ONNX Runtime has no kernel."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    t = torch.arange(q.shape[2])
    apart = F.relu(t[:, None] - t).to(v.dtype)
    return merge((q @ k.transpose(-1, -2) * (0.9**apart * (t[:, None] >= t))) @ v)


@formulation(COLLECTED)
def power_times_comparison(q, k, v):
    """RetNet of several repositories: (n >= m) * gamma ** (n - m), NaN set to 0."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    n = torch.arange(q.shape[2]).unsqueeze(1)
    m = torch.arange(q.shape[2]).unsqueeze(0)
    decay = (0.97 ** (n - m)) * (n >= m).to(v.dtype)
    decay[decay != decay] = 0
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


@formulation(COLLECTED)
def clamped_gates(q, k, v):
    """exp((G_t - G_s).clamp(max=0.0)), as HGRN2 and others guard it: Clip, where of 0 it is Min."""
    total = F.logsigmoid(split(q).mean(-1)).transpose(1, 2).cumsum(-1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    apart = (total[..., :, None] - total[..., None, :]).clamp(max=0.0).exp()
    return merge((q @ k.transpose(-1, -2) * apart).tril() @ v)


@formulation(COLLECTED)
def minimum_gates(q, k, v):
    """The same with torch.minimum."""
    total = -F.softplus(split(q).mean(-1)).transpose(1, 2).cumsum(-1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    apart = total[..., :, None] - total[..., None, :]
    apart = torch.minimum(apart, torch.zeros_like(apart)).exp()
    return merge(((q @ k.transpose(-1, -2)).tril() * apart) @ v)


@formulation(COLLECTED)
def rectified_gates(q, k, v):
    """exp(-relu(G_s - G_t))."""
    total = F.logsigmoid(split(q).mean(-1)).transpose(1, 2).cumsum(-1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    apart = (-F.relu(total[..., None, :] - total[..., :, None])).exp()
    return merge((q @ k.transpose(-1, -2) * apart).tril() @ v)


@formulation(COLLECTED)
def gates_per_channel(q, k, v):
    """GLA: exp(G) on queries, exp(-G) on keys, a gate for each channel."""
    gate = F.logsigmoid(heads_first(k)) / 16
    total = gate.cumsum(2)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    scores = (q * total.exp()) @ (k * (-total).exp()).transpose(-1, -2)
    return merge(scores.tril() @ v)


@formulation(COLLECTED)
def hgrn2(q, k, v):
    """Keys are 1 - forget gate, a decay for each channel."""
    forget = torch.sigmoid(heads_first(k) + 2)
    total = forget.log().cumsum(2)
    q, v = heads_first(q), heads_first(v)
    weights = (total[:, :, :, None] - total[:, :, None]).clamp(max=0).exp()
    scores = torch.einsum("bhtd,bhsd,bhtsd->bhts", q, 1 - forget, weights)
    return merge(scores.tril() @ v)


def segsum(x: torch.Tensor) -> torch.Tensor:
    """Sums x_{s+1} + ... + x_t, and -inf where s > t."""
    length = x.shape[-1]
    x = x[..., None].expand(*x.shape, length)
    mask = torch.ones(length, length, dtype=torch.bool).tril(-1)
    total = x.masked_fill(~mask, 0).cumsum(-2)
    mask = torch.ones(length, length, dtype=torch.bool).tril(0)
    return total.masked_fill(~mask, -torch.inf)


@formulation(COLLECTED)
def segment_sums(q, k, v):
    """Mamba-2's minimal code: masked segment sums, then exp."""
    decay = segsum(-F.softplus(split(q).mean(-1)).transpose(1, 2)).exp()
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


@formulation(COLLECTED)
def product_of_gates(q, k, v):
    """Gates multiplied up with cumprod."""
    gate = torch.sigmoid(split(k).mean(-1) + 4).transpose(1, 2)
    total = gate.cumprod(-1)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    decay = (total[..., :, None] / total[..., None, :]).tril()
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


class StoredDecays(nn.Module):
    """A decay matrix in a buffer, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        t = torch.arange(LONGEST, dtype=torch.float32)
        decay = rates()[:, None, None] ** (t[:, None] - t).clamp(min=0)
        self.register_buffer("decay", decay.tril())

    def forward(self, q, k, v):
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        length = q.shape[2]
        return merge((q @ k.transpose(-1, -2) * self.decay[:, :length, :length]) @ v)


formulation(COLLECTED)(StoredDecays)


@formulation(COLLECTED)
def alibi_of_linear(q, k, v):
    """ALiBi slopes as decays: exp of the bias, under a triangle, normalised."""
    q, k, v = (F.elu(heads_first(x)) + 1 for x in (q, k, v))
    t = torch.arange(q.shape[2])
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    bias = -(t[:, None] - t).abs() * slopes[:, None, None]
    scores = (q @ k.transpose(-1, -2) * bias.exp()).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


class LearntDecays(nn.Module):
    """A trained decay of each head, sigmoid of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(2, 5, HEADS))

    def forward(self, q, k, v):
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        t = torch.arange(q.shape[2])
        apart = (t[:, None] - t).to(v.dtype)
        decay = torch.exp(F.logsigmoid(self.rate)[:, None, None] * apart)
        return merge((q @ k.transpose(-1, -2) * decay.masked_fill(apart < 0, 0)) @ v)


formulation(COLLECTED)(LearntDecays)


@formulation(COLLECTED)
def rotated_and_decayed(q, k, v):
    """RetNet: rotary queries and keys, and a decay."""
    q, k, v = rotate(heads_first(q)), rotate(heads_first(k)), heads_first(v)
    t = torch.arange(q.shape[2])
    decay = torch.where(t[:, None] >= t, 0.95 ** (t[:, None] - t).clamp(min=0).to(v.dtype), 0)
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


class Simple(nn.Module):
    """Simple GLA as a layer of its own, gated output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, q, k, v):
        total = F.logsigmoid(self.gate(v)).mT.cumsum(-1)
        swish = F.silu(v)
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        return self.out(merge((q @ k.mT * decay) @ v) * swish)


formulation(COLLECTED)(Simple)
