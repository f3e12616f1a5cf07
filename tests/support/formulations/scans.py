"""Recurrences by scans of several kinds, running maxima, and state spaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


@formulation(COLLECTED)
def running_sum(q, k, v):
    return q * v.cumsum(1) + k


@formulation(COLLECTED)
def sums_indexed_by_all_positions(q, k, v):
    """trim-transformer: sums of outer products at positions 0, 1, ..., which are all."""
    q, k, v = (split(x).transpose(1, 2) for x in (q, k, v))
    sums = (k[..., None] @ v[..., None, :]).cumsum(2)
    sums = sums[..., torch.arange(v.shape[2], dtype=torch.int32), :, :]
    return (q[..., None, :] @ sums).squeeze(-2).transpose(1, 2).flatten(2)


@formulation(COLLECTED, reason="Max is computed of it")
def running_maximum(q, k, v):
    return q * v.cummax(1).values + k


@formulation(COLLECTED, reason="Min is computed of it")
def running_minimum(q, k, v):
    return q * v.cummin(1).values + k


@formulation(COLLECTED, reason="adds up exponentials")
def running_logsumexp(q, k, v):
    return q + v.logcumsumexp(1) * k


@formulation(COLLECTED)
def running_product(q, k, v):
    """A product of gates, carried as the sum of their logarithms."""
    return q * torch.sigmoid(v + 3).cumprod(1) + k


@formulation(COLLECTED, reason="Max is computed of it")
def stable_softmax_over_the_past(q, k, v):
    """Aaren with the running maximum subtracted."""
    largest = k.cummax(1).values
    apart = k[:, None] - largest[:, :, None]
    weights = apart.clamp(max=0).exp() * torch.ones(k.shape[1], k.shape[1]).tril()[..., None]
    return (weights * v[:, None]).sum(2) / weights.sum(2) + 0 * q


@formulation(COLLECTED)
def gated_recurrence_of_products(q, k, v):
    """RG-LRU: h = a h + sqrt(1 - a^2) i x, by powers in log space."""
    log_a = -8 * F.softplus(torch.linspace(-5, -3, WIDTH)) * torch.sigmoid(q)
    x = torch.sigmoid(k) * v * torch.sqrt(1 - torch.exp(2 * log_a))
    total = log_a.cumsum(1)
    apart = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
    mask = torch.ones(q.shape[1], q.shape[1]).tril()[None, :, :, None]
    return (apart * mask * x[:, None]).sum(2)


@formulation(COLLECTED)
def exponential_moving_average(q, k, v):
    """(1 - a) a^(t - s) as a Toeplitz matrix."""
    t = torch.arange(v.shape[1])
    past = (t[:, None] - t).clamp(min=0)
    return q + ((0.1 * 0.9**past).tril() @ v) * k


@formulation(COLLECTED)
def scan_of_torch(q, k, v):
    """torch's scan operator, not yet in its public interface."""

    def step(h, x):
        h = torch.sigmoid(x[0]) * h + x[1]
        return h, h.clone()

    _, out = scan(step, torch.zeros_like(v[:, 0]), (k, v), dim=1)
    return out.transpose(0, 1) + q if out.shape[0] != v.shape[0] else out + q


@formulation(COLLECTED)
def scan_of_outer_products(q, k, v):
    """Linear attention as a scan with a matrix as its state."""
    q, k, v = split(q), split(k), split(v)

    def step(state, x):
        query, key, value = x
        state = 0.9 * state + key[..., :, None] * value[..., None, :]
        return state, torch.einsum("bhd,bhde->bhe", query, state)

    start = torch.zeros(q.shape[0], HEADS, D, D)
    moved = tuple(x.transpose(0, 1) for x in (q, k, v))
    return scan(step, start, moved, dim=0)[1].transpose(0, 1).flatten(2)


@formulation(COLLECTED)
def associative_scan_of_torch(q, k, v):
    """torch's associative scan, a tree."""

    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, out = associative_scan(combine, (torch.sigmoid(k), v), dim=1, combine_mode="generic")
    return out + q


@formulation(COLLECTED)
def tree_scan(q, k, v):
    """Shifts by 1, 2, 4, ...: Hillis and Steele."""
    a, b = torch.sigmoid(k), v
    step = 1
    while step < v.shape[1]:
        before = F.pad(b, (0, 0, step, 0))[:, : v.shape[1]]
        b = b + a * before
        a = a * F.pad(a, (0, 0, step, 0), value=1.0)[:, : v.shape[1]]
        step *= 2
    return b + q


class DiagonalStateSpace(nn.Module):
    """S4D with real poles: the kernel of powers as a Toeplitz matrix over channels and poles."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.1, 1, 4))
        self.c = nn.Parameter(torch.randn(WIDTH, 4))

    def powers(self, apart):
        return torch.exp(-self.rate * apart)

    def forward(self, q, k, v):
        t = torch.arange(v.shape[1])
        powers = self.powers((t[:, None] - t).clamp(min=0)[..., None])
        mask = (t[:, None] >= t).to(v.dtype)[..., None]
        return torch.einsum("tsn,bsd,dn->btd", powers * mask, v, self.c) + q * k


formulation(COLLECTED, reason="of more products than are followed")(DiagonalStateSpace)


class ComplexStateSpace(DiagonalStateSpace):
    """S4D with complex poles, as a Vandermonde product."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.linspace(0, 3, 4))

    def powers(self, apart):
        return torch.exp(torch.complex(-self.rate, self.turn) * apart).real


formulation(COLLECTED, reason="of more products than are followed")(ComplexStateSpace)


class PairsOfReals(nn.Module):
    """The same with cosines: pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.1, 1, 4))
        self.turn = nn.Parameter(torch.linspace(0, 3, 4))
        self.c = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, q, k, v):
        t = torch.arange(v.shape[1]).to(v.dtype)[:, None]
        cos, sin = torch.cos(t * self.turn), torch.sin(t * self.turn)
        rows = torch.cat([cos, sin], -1)
        apart = (t - t.mT).clamp(min=0)
        decay = torch.exp(-torch.cat([self.rate, self.rate]) * apart[..., None])
        mask = (t >= t.mT).to(v.dtype)[..., None]
        c = torch.cat([self.c, self.c], -1)
        return torch.einsum("tn,tsn,sn,bsd,dn->btd", rows, decay * mask, rows, v, c) + q * k


formulation(COLLECTED, reason="is not one of query, key and value")(PairsOfReals)


@formulation(COLLECTED, nodes=2)
def wkv_of_rwkv4(q, k, v):
    """RWKV-4 written out over pairs of positions, without a maximum."""
    rate = torch.linspace(0.1, 1.5, WIDTH)
    t = torch.arange(q.shape[1])
    apart = (t[:, None] - t - 1).clamp(min=0)[..., None]
    earlier = (t[:, None] > t)[..., None].to(v.dtype)
    weights = torch.exp(-rate * apart + k[:, None]) * earlier
    own = torch.exp(0.3 + k)
    top = (weights * v[:, None]).sum(2) + own * v
    return torch.sigmoid(q) * top / (weights.sum(2) + own)


@formulation(COLLECTED, nodes=2)
def wkv_of_one_matrix(q, k, v):
    """The same with the token's own weight on the diagonal, and channels that fade at once."""
    rate, t = torch.linspace(-2, 5, WIDTH).exp(), torch.arange(q.shape[1])
    apart = t[:, None] - t - 1
    weights = torch.where((apart >= 0)[..., None], torch.exp(-rate * apart[..., None]), 0.0)
    weights = weights + torch.eye(q.shape[1])[..., None] * torch.linspace(0.5, 2, WIDTH)
    top, below = (torch.einsum("tsd,bsd->btd", weights, x) for x in (k.exp() * v, k.exp()))
    return torch.sigmoid(q) * top / below


@formulation(COLLECTED)
def retention_beside_the_token_itself(q, k, v):
    """Scores under a decay of earlier tokens, and those of a token with itself as they are."""
    t = torch.arange(q.shape[1])
    rate = torch.linspace(0.8, 0.99, HEADS)[:, None, None]
    decays = rate ** (t[:, None] - t).clamp(min=0) * (t[:, None] > t) + torch.eye(q.shape[1])
    scores = heads_first(q) @ heads_first(k).mT * decays
    return merge(scores @ heads_first(v))


@formulation(COLLECTED, nodes=2)
def attention_beside_the_token_itself(q, k, v):
    """Both sums of a quotient have it, the denominator as a number."""
    scores = (phi(heads_first(q)) @ phi(heads_first(k)).mT).tril(-1) + torch.eye(q.shape[1])
    return merge(scores @ heads_first(v) / scores.sum(-1, keepdim=True))


@formulation(COLLECTED, nodes=2)
def wkv_token_by_token(q, k, v):
    """The same as a loop, whose step divides."""
    rate, own = torch.exp(-torch.linspace(0.1, 1.5, WIDTH)), torch.exp(0.3 + k)
    top, below = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0])
    out = []
    for t in range(v.shape[1]):
        out.append((top + own[:, t] * v[:, t]) / (below + own[:, t]))
        top, below = rate * top + torch.exp(k[:, t]) * v[:, t], rate * below + torch.exp(k[:, t])
    return torch.sigmoid(q) * torch.stack(out, 1)


@formulation(COLLECTED)
def loop_over_tokens(q, k, v):
    """A Python loop, its states in a list."""
    h, out = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        h = torch.sigmoid(k[:, t]) * h + v[:, t]
        out.append(h)
    return torch.stack(out, 1) + q


@formulation(COLLECTED, nodes=2, streams=False, branches=2)
def two_branches(q, k, v):
    """One of two sums, by a condition on all tokens: both are computed."""

    def causal(x, y):
        return x * y.cumsum(1)

    k, v = k + 0.5, v + 0.5
    return torch.cond(q.sum() > 0, lambda a, b: causal(a, b), lambda a, b: causal(b, a), (k, v))
