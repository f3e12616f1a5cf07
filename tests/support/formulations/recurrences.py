"""First-order recurrences h_t = a_t h_{t-1} + b_t, and sums over earlier tokens alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.formulations.notation import CAUSAL, WIDTH, formulation

CHANNELS = {"update_rule": "gated", "q_num_heads": 1, "kv_num_heads": WIDTH, "d_k": 1, "d_v": 1}
SUM = {"update_rule": "linear", "kv_num_heads": 1, "d_k": 1, "d_v": WIDTH}


@formulation(CAUSAL, **SUM)
def running_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bare cumulative sum, divided by the number of tokens."""
    return v.cumsum(1) / (torch.arange(v.shape[1]) + 1).view(1, -1, 1) * torch.sigmoid(q) + k


@formulation(CAUSAL, nodes=2, **SUM)
def running_mean_of_exponents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Aaren, or AFT-simple: a softmax over the past, element by element."""
    return torch.sigmoid(q) * (k.exp() * v).cumsum(1) / k.exp().cumsum(1)


def logarithm_of_positive(x: Tensor) -> Tensor:
    """log g(x) of minGRU, g(x) = x + 0.5 for x >= 0 and sigmoid(x) below."""
    return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))


def in_log_space(coefficients: Tensor, values: Tensor) -> Tensor:
    """Heinsen's scan: exp(A + logcumsumexp(log b - A)), A the cumulative sum of log a."""
    total = coefficients.cumsum(1)
    return (total + (values - total).logcumsumexp(1)).exp()


@formulation(CAUSAL, **CHANNELS)
def min_gru(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """minGRU (Feng et al. 2024), as published."""
    values = -F.softplus(-k) + logarithm_of_positive(v)
    return in_log_space(-F.softplus(k), values)


@formulation(CAUSAL, **CHANNELS)
def min_lstm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """minLSTM, as published."""
    difference = F.softplus(-q) - F.softplus(-k)
    values = -F.softplus(-difference) + logarithm_of_positive(v)
    return in_log_space(-F.softplus(difference), values)


@formulation(CAUSAL, **CHANNELS)
def quotient_of_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp(A) cumsum(b exp(-A)), with decays near 1, gated: GateLoop."""
    total = F.logsigmoid(k + 6).cumsum(1)
    return q * (total.exp() * (v * (-total).exp()).cumsum(1))


@formulation(CAUSAL, **CHANNELS)
def triangle_of_decays(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every pair of positions, a decay for each channel."""
    total = F.logsigmoid(k).cumsum(1)
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)[..., None]
    weights = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
    return (weights * v[:, None]).sum(2)


@formulation(CAUSAL, update_rule="gated", kv_num_heads=1, d_v=WIDTH)
def moving_average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Powers of one decay under a triangle."""
    t = torch.arange(v.shape[1])
    past = t[:, None] - t
    return torch.where(past >= 0, 0.9 ** past.clamp(min=0).to(v.dtype), 0.0) @ v


@formulation(CAUSAL, **CHANNELS)
def powers_of_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Powers of a decay for each channel: a real diagonal state space."""
    t = torch.arange(v.shape[1])
    past = (t[:, None] - t)[..., None]
    rates = torch.linspace(0.5, 0.95, WIDTH)
    weights = torch.where(past >= 0, rates ** past.clamp(min=0).float(), 0.0)
    return torch.einsum("tsd,bsd->btd", weights, v)
