"""Scores that pass through a polynomial before they meet the values."""

from __future__ import annotations

import math

import torch

from tests.support.formulations.notation import (
    BIDIRECTIONAL,
    CAUSAL,
    EPS,
    OTHER,
    PLAIN,
    SEPARATE,
    D,
    both,
    formulation,
    heads_first,
    merge,
    over_sum,
    phi,
    products,
    split,
    taylor_kernel,
)


@formulation(CAUSAL, eps=EPS, **both("taylor2"))
def taylor_scores(q, k, v):
    scores = heads_first(q) @ heads_first(k).transpose(-1, -2) / math.sqrt(D)
    weights = taylor_kernel(scores).tril()
    return merge(weights @ heads_first(v) / (weights.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **both("taylor2") | {"normalize": False})
def taylor_scores_doubled(q, k, v):
    """2 + 2 c x + (c x)^2 of scores x, with a c of its own and the square as a power."""
    t = 0.2 * torch.einsum("bthd,bshd->bhts", split(q), split(k))
    later = ~torch.ones(t.shape[-1], t.shape[-1], dtype=torch.bool).tril()
    weights = (2 + 2 * t + t**2).masked_fill(later, 0.0)
    return torch.einsum("bhts,bshe->bthe", weights, split(v)).flatten(2)


@formulation(CAUSAL, **both("polynomial") | PLAIN)
def other_polynomial(q, k, v):
    t = products(q, k) / math.sqrt(D)
    return merge((1 + t + t * t).tril() @ heads_first(v))


@formulation(CAUSAL, **both("polynomial") | PLAIN)
def even_polynomial(q, k, v):
    return merge((1 + (products(q, k) / math.sqrt(D)) ** 2).tril() @ heads_first(v))


@formulation(CAUSAL, **both("polynomial") | PLAIN)
def cubic_polynomial(q, k, v):
    t = products(q, k) / math.sqrt(D)
    return merge((taylor_kernel(t) + t * t * t / 6).tril() @ heads_first(v))


@formulation(CAUSAL, **both("taylor2") | PLAIN)
def taylor_scores_of_mapped(q, k, v):
    t = phi(heads_first(q)) @ phi(heads_first(k)).transpose(-1, -2) / math.sqrt(D)
    return merge(taylor_kernel(t).tril() @ heads_first(v))


@formulation(CAUSAL, eps=EPS, **both("quadratic"))
def squared_scores(q, k, v):
    mask = torch.ones(q.shape[1], q.shape[1]).tril()
    return over_sum((products(q, k) / D) ** 2 * mask, v)


@formulation(CAUSAL, eps=EPS, **both("quadratic"))
def squared_masked_scores(q, k, v):
    """The mask before the square, which 0 stays 0 under."""
    scores = products(q, k).tril() * 0.5
    return over_sum(scores * scores, v)


@formulation(CAUSAL, eps=EPS, **both("quadratic"))
def squared_scores_and_one(q, k, v):
    return over_sum(((products(q, k) + 1) ** 2).tril(), v)


@formulation(CAUSAL, eps=EPS, **both("polynomial"))
def fourth_power(q, k, v):
    return over_sum(((products(q, k) / math.sqrt(D) + 0.5) ** 4).tril(), v)


@formulation(CAUSAL, eps=EPS, **both("polynomial"))
def cube_of_positive_scores(q, k, v):
    return over_sum((products(q.relu(), k.relu()) ** 3).tril(), v)


@formulation(CAUSAL, eps=EPS, **both("polynomial"))
def bias_on_positive_scores(q, k, v):
    return over_sum((products(q.exp(), k.exp()) + 0.25).tril(), v)


@formulation(BIDIRECTIONAL, eps=EPS, **both("taylor2"))
def taylor_scores_of_all(q, k, v):
    return over_sum(taylor_kernel(products(q, k) / math.sqrt(D)), v)


@formulation(BIDIRECTIONAL, eps=EPS, **both("quadratic"))
def squared_scores_of_all(q, k, v):
    return over_sum(products(q, k) ** 2, v)


@formulation(BIDIRECTIONAL, eps=0.0, **both("quadratic"))
def squared_scores_and_one_of_all(q, k, v):
    weights = (products(q, k) + 1) ** 2
    return merge((weights / weights.sum(-1, keepdim=True)) @ heads_first(v))


@formulation(OTHER)
def negative_coefficient(q, k, v):
    t = products(q, k) / math.sqrt(D)
    return merge((1 - t + t * t).tril() @ heads_first(v))


@formulation(OTHER)
def sum_of_cubes(q, k, v):
    """What it is divided by may be a small sum of large terms."""
    return over_sum((products(q, k) ** 3).tril(), v)


@formulation(OTHER)
def sixth_power_of_wide_heads(q, k, v):
    """Features of this one would be as many as 12,376."""
    return over_sum((products(q, k) ** 4 * products(q, k) ** 2).tril(), v)


@formulation(SEPARATE, nodes=2, **both("taylor2") | {"normalize": False})
def taylor_scores_over_others(q, k, v):
    """The denominator is not of the same polynomial."""
    t = heads_first(q) @ heads_first(k).transpose(-1, -2) / math.sqrt(D)
    weights = taylor_kernel(t).tril()
    return merge(weights @ heads_first(v) / (taylor_kernel(2 * t).tril().sum(-1, True) + EPS))
