"""Forms whose operators PyTorch's exporter fails at, or writes in a way of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    D,
    formulation,
    heads_first,
    merge,
    split,
)


@formulation(COLLECTED)
def rates_of_numbers_minus_integers(q, k, v):
    """RetNet's rates, 1 - 2^(-5 - h): a number minus integers has no translation."""
    q, k, v = map(heads_first, (q, k, v))
    rate = (1 - torch.exp2(-5.0 - torch.arange(HEADS))).log2()
    n = torch.arange(q.shape[2])
    decay = torch.exp2((n[:, None] - n) * rate.view(-1, 1, 1)) * n[:, None].ge(n)
    return merge(torch.einsum("bhqd,bhkd,hqk->bhqk", q, k, decay) @ v)


@formulation(COLLECTED)
def delta_rule_by_a_solve_with_a_diagonal(q, k, v):
    """The diagonal is 1, and nothing says so to the solver."""
    q, k, v = heads_first(q), F.normalize(heads_first(k), dim=-1), heads_first(v)
    beta = torch.sigmoid(q.mean(-1, keepdim=True))
    matrix = torch.eye(q.shape[2]) + torch.tril(beta * k @ k.mT, -1)
    new = torch.linalg.solve_triangular(matrix, beta * v, upper=False)
    return merge(torch.tril(q @ k.mT) @ new)


@formulation(COLLECTED)
def last_tokens_behind_a_state(q, k, v):
    """minGRU in log space: h_0 in front of the tokens is cut off by counting from the end."""
    rates, values = -F.softplus(k), -F.softplus(-k) + F.softplus(v).log()
    start = torch.full_like(values[:, :1], 0.5)
    values, rates = torch.cat((start.log(), values), 1), F.pad(rates, (0, 0, 1, 0))
    total = rates.cumsum(1)
    h = (total + (values - total).logcumsumexp(1)).exp()
    return h[:, -k.shape[1] :] * q


@formulation(COLLECTED)
def logarithm_of_a_state_as_a_number(q, k, v):
    """minLSTM in log space: log h_0 is a number, and decays are added before a zero is in front."""
    apart = F.softplus(-q) - F.softplus(-k)
    total = F.pad(-F.softplus(apart).cumsum(1), (0, 0, 1, 0))
    start = torch.full((v.shape[0], 1, v.shape[2]), -0.6931)
    values = torch.cat((start, -F.softplus(-apart) + F.softplus(v).log()), 1)
    return (total + (values - total).logcumsumexp(1)).exp()[:, 1:]


@formulation(COLLECTED)
def positions_of_a_range(q, k, v):
    """flash-linear-attention's naive retention: positions are the numbers of a Python range."""
    q, k, v = map(heads_first, (q, k, v))
    rate = (1 - q.new_tensor(2.0).pow(-5.0 - q.new_tensor(range(HEADS)))).log2()
    n = q.new_tensor(range(q.shape[2]))
    decay = torch.exp2((n.unsqueeze(-1) - n) * rate.view(-1, 1, 1)) * n.unsqueeze(-1).ge(n)
    return merge(torch.einsum("bhqd,bhkd,hqk->bhqk", q, k, decay) @ v)


@formulation(COLLECTED)
def quotient_of_products(q, k, v):
    """A selective scan as P cumsum(b / P), with P the cumulative product of its rates."""
    step = F.softplus(split(q).mean(-1, keepdim=True))
    products = torch.cumprod(torch.exp(-step * torch.linspace(0.1, 0.5, D)), dim=1)
    return (products * torch.cumsum(step * split(v) / products, dim=1)).flatten(2) * k


@formulation(COLLECTED)
def query_times_quotient_of_products(q, k, v):
    """q P cumsum(b / P): from left to right, the query meets the decays first."""
    products = torch.sigmoid(k + 4).cumprod(1)
    return q * products * (v / products).cumsum(1)


@formulation(COLLECTED)
def gates_over_their_sum_in_log_space(q, k, v):
    """minLSTM: torch writes ``logaddexp`` as the logarithm of a sum of exponentials."""
    forget, new = F.logsigmoid(60 * q), F.logsigmoid(60 * k)
    both = torch.logaddexp(forget, new)
    total = (forget - both).cumsum(1)
    return (total + (new - both + F.softplus(v).log() - total).logcumsumexp(1)).exp()


@formulation(COLLECTED)
def steep_gates_in_log_space(q, k, v):
    """minLSTM whose gates close within a token."""
    apart = 30 * (F.softplus(-q) - F.softplus(-k))
    total = F.logsigmoid(-apart).cumsum(1)
    return (total + (F.logsigmoid(apart) + F.softplus(v).log() - total).logcumsumexp(1)).exp()
