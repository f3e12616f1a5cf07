"""Causal attention whose keys fade: fixed rates, and gates of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import (
    CAUSAL,
    HEADS,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
)


@formulation(CAUSAL, update_rule="gated", normalize=False)
def retnet(q, k, v):
    """gamma^(t - s), a gamma for every head."""
    q, k, v = heads_first(q) * D**-0.5, heads_first(k), heads_first(v)
    t = torch.arange(q.shape[2], dtype=torch.float32)
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float32))
    apart = t[:, None] - t[None, :]
    decay = torch.where(apart >= 0, gamma[:, None, None] ** apart, 0.0)
    return merge((q @ k.transpose(-1, -2) * decay) @ v)


@formulation(CAUSAL, update_rule="gated", normalize=False)
def retnet_clamped(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    length = q.shape[2]
    t = torch.arange(length)
    gamma = torch.linspace(0.8, 0.99, HEADS).log()
    decay = torch.exp((t[:, None] - t[None, :]).clamp(min=0) * gamma[:, None, None])
    return merge((q @ k.transpose(-1, -2) * torch.tril(decay)) @ v)


class Gated(nn.Module):
    """Decays of the input: exp of differences of cumulative sums, -inf above the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, q, k, v):
        decay = F.logsigmoid(self.gate(q)).transpose(1, 2).cumsum(-1)
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        length = q.shape[2]
        apart = decay.unsqueeze(-1) - decay.unsqueeze(-2)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        decay = torch.exp(apart.masked_fill(later, float("-inf")))
        return merge((q @ k.transpose(-1, -2) * decay) @ v)


formulation(CAUSAL, update_rule="gated", normalize=False)(Gated)
