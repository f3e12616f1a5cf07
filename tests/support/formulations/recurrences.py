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


@formulation(CAUSAL, normalize=True, **CHANNELS)
def running_mean_of_exponents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Aaren, or AFT-simple: a softmax over the past, element by element."""
    return torch.sigmoid(q) * (k.exp() * v).cumsum(1) / k.exp().cumsum(1)


@formulation(CAUSAL, nodes=2, **{**SUM, "d_v": 1})
def cumulative_layer_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mean and variance of all channels of the tokens so far: of sums over channels, not of v."""
    count = (torch.arange(v.shape[1]) + 1).view(1, -1, 1) * WIDTH
    mean = v.sum(-1, keepdim=True).cumsum(1) / count
    squares = v.square().sum(-1, keepdim=True).cumsum(1) / count
    return torch.sigmoid(q) * (v - mean) / (squares - mean.square() + 0.01).sqrt() + k


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


def behind_a_state(coefficients: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """Heinsen's scan of h_0 and the tokens, as published: T + 1 positions, of which T are kept."""
    total = F.pad(coefficients.cumsum(1), (0, 0, 1, 0))
    values = torch.cat([state, values], dim=1)
    return (total + (values - total).logcumsumexp(1)).exp()[:, 1:]


@formulation(CAUSAL, **CHANNELS)
def min_gru_from_a_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """minGRU with g(0) as h_0."""
    state = logarithm_of_positive(v.new_zeros(v.shape[0], 1, WIDTH))
    return behind_a_state(-F.softplus(k), -F.softplus(-k) + logarithm_of_positive(v), state)


@formulation(CAUSAL, **CHANNELS)
def min_lstm_from_a_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """minLSTM with an h_0 that is stored, gated."""
    difference = F.softplus(-q) - F.softplus(-k)
    values = -F.softplus(-difference) + logarithm_of_positive(v)
    state = torch.linspace(0.1, 3.0, WIDTH, dtype=v.dtype).log().expand(v.shape[0], 1, WIDTH)
    return torch.sigmoid(q) * behind_a_state(-F.softplus(difference), values, state)


@formulation(CAUSAL, **CHANNELS)
def average_from_a_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Quotients of products with decays near 1; h_0 is one number of each channel."""
    total = F.pad(F.logsigmoid(k + 6).cumsum(1), (0, 0, 1, 0))
    state = torch.linspace(-1.0, 1.0, WIDTH, dtype=v.dtype).expand(v.shape[0], 1, WIDTH)
    return (total.exp() * (torch.cat([state, v], 1) * (-total).exp()).cumsum(1))[:, 1:]
