"""Softmax over earlier tokens with scores of keys alone: Aaren, sLSTM without recurrent weights.

    sum_s [s <= t] exp(G_t - G_s + i_s) v_s / sum_s [s <= t] exp(G_t - G_s + i_s)

Scores are large, so that sums of their exponentials leave float32.
"""

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

LARGE = 30
"""Times the scores."""


def past(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def scores_of_heads(k: torch.Tensor) -> torch.Tensor:
    """Products with one learnt query for each head, (B, H, T)."""
    query = torch.linspace(-1, 1, HEADS * D).view(HEADS, D)
    return LARGE * torch.einsum("bthd,hd->bht", split(k), query)


@formulation(COLLECTED)
def aaren_by_a_logarithm(q, k, v):
    """Weights exp(s - log of the sum so far), masked before exp."""
    s = scores_of_heads(k)
    apart = s[:, :, None] - s.logcumsumexp(-1)[..., None]
    weights = apart.masked_fill(~past(s.shape[-1]), -torch.inf).exp()
    return merge(weights @ heads_first(v)) * q


@formulation(COLLECTED)
def aaren_by_a_softmax(q, k, v):
    """A softmax over pairs of tokens, whose rows differ by their mask alone; sums as scores."""
    s = LARGE * (split(k) * torch.linspace(-1, 1, D)).sum(-1).transpose(1, 2)
    s = s[:, :, None].expand(-1, -1, v.shape[1], -1)
    weights = s.masked_fill(~past(v.shape[1]), -torch.inf).softmax(-1)
    return merge(weights @ heads_first(v)) + q


@formulation(COLLECTED)
def aaren_below_a_maximum(q, k, v):
    """A maximum that is subtracted from both sums, masked behind exp; a score for each channel."""
    largest = k.cummax(1).values
    weights = (k[:, None] - largest[:, :, None]).exp() * past(k.shape[1])[..., None]
    return q * (weights * v[:, None]).sum(2) / weights.sum(2)


@formulation(COLLECTED)
def aaren_token_by_token(q, k, v):
    """The paper's recurrence of a, c and m."""
    s = scores_of_heads(k).transpose(1, 2)
    v = split(v)
    a, c, m = torch.zeros_like(v[:, 0]), torch.zeros_like(s[:, 0]), s.new_full(s[:, 0].shape, -1e30)
    out = []
    for t in range(v.shape[1]):
        largest = torch.maximum(m, s[:, t])
        kept, new = torch.exp(m - largest), torch.exp(s[:, t] - largest)
        a, c, m = a * kept[..., None] + v[:, t] * new[..., None], c * kept + new, largest
        out.append((a / c[..., None]).flatten(1))
    return torch.stack(out, 1) + q


@formulation(COLLECTED, nodes=2)
def aaren_by_a_tree(q, k, v):
    """The paper's scan of m, u and w, by shifts of 1, 2, 4, ..."""
    m, w, length, shift = scores_of_heads(k), heads_first(v), v.shape[1], 1
    u = torch.ones_like(m)
    while shift < length:
        before = F.pad(m, (shift, 0), value=-1e9)[..., :length]
        largest = torch.maximum(m, before)
        kept, added = torch.exp(m - largest), torch.exp(before - largest)
        u = u * kept + F.pad(u, (shift, 0))[..., :length] * added
        w = w * kept[..., None] + F.pad(w, (0, 0, shift, 0))[..., :length, :] * added[..., None]
        m, shift = largest, 2 * shift
    return merge(w / u[..., None]) * q


@formulation(COLLECTED)
def slstm_token_by_token(q, k, v):
    """An sLSTM whose gates read the token alone, with its stabiliser."""
    i, f, z = LARGE * k, F.logsigmoid(q + 2), torch.tanh(v)
    c, n, m = (torch.zeros_like(z[:, 0]) for _ in range(3))
    out = []
    for t in range(z.shape[1]):
        largest = torch.maximum(f[:, t] + m, i[:, t])
        new, kept = torch.exp(i[:, t] - largest), torch.exp(f[:, t] + m - largest)
        c, n, m = kept * c + new * z[:, t], kept * n + new, largest
        out.append(torch.sigmoid(q[:, t]) * c / n)
    return torch.stack(out, 1)


@formulation(COLLECTED)
def slstm_of_pairs(q, k, v):
    """All pairs of tokens, the largest exponent subtracted."""
    total = F.logsigmoid(q + 2).cumsum(1)
    apart = total[:, :, None] - total[:, None] + LARGE * k[:, None]
    apart = apart.masked_fill(~past(v.shape[1])[..., None], -torch.inf)
    weights = (apart - apart.amax(2, keepdim=True)).exp()
    return torch.sigmoid(q) * torch.einsum("btsc,bsc->btc", weights, torch.tanh(v)) / weights.sum(2)


@formulation(COLLECTED)
def slstm_by_sums(q, k, v):
    """Quotients of sums, in which the decays up to the query cancel."""
    new = (k - F.logsigmoid(q + 4).cumsum(1)).exp()
    return (new * torch.tanh(v)).cumsum(1) / new.cumsum(1)


@formulation(COLLECTED)
def maximum_beside_queries(q, k, v):
    """Queries and keys besides, over the sum alone, from which the maximum cancels."""
    exponent, v = LARGE * v.mean(-1), v + 0.5
    apart = exponent[:, None] - exponent.cummax(1).values[..., None]
    weights = F.softplus(q) @ F.softplus(k).mT * apart.exp() * past(v.shape[1])
    return weights @ v / weights.sum(-1, keepdim=True)


@formulation(COLLECTED, reason="a number of each query subtracted")
def softmax_below_a_maximum_with_eps(q, k, v):
    """What is added to the denominator keeps the maximum from cancelling."""
    largest = k.cummax(1).values
    weights = (k[:, None] - largest[:, :, None]).exp() * past(k.shape[1])[..., None]
    return q * (weights * v[:, None]).sum(2) / (weights.sum(2) + 0.1)


@formulation(COLLECTED, reason="not the sum over the same queries and keys")
def softmax_over_another_sum(q, k, v):
    """The logarithm is of other scores."""
    s = k.mean(-1)
    weights = (s[:, None] - (1.5 * s).logcumsumexp(1)[..., None]).exp().tril()
    return weights @ v * q


@formulation(COLLECTED, reason="is computed of it")
def slstm_with_recurrent_weights(q, k, v):
    """The gates read the output before: no linear recurrence."""
    c, n, m, h = (torch.zeros_like(v[:, 0]) for _ in range(4))
    out = []
    for t in range(v.shape[1]):
        f = F.logsigmoid(q[:, t] + 0.5 * h.roll(1, -1))
        largest = torch.maximum(f + m, k[:, t])
        new, kept = torch.exp(k[:, t] - largest), torch.exp(f + m - largest)
        c, n, m = kept * c + new * torch.tanh(v[:, t] + h), kept * n + new, largest
        h = torch.sigmoid(q[:, t]) * c / n
        out.append(h)
    return torch.stack(out, 1)
