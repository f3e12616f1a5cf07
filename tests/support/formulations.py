"""Linear attention as people write it: small modules, each in a style of its own.

Every module takes ``(B, T, WIDTH)`` tensors: one, which it projects, or query, key and value.
``CAUSAL`` and ``BIDIRECTIONAL`` map names to formulations that must be recognised, ``OTHER`` those
that must not be, ``SEPARATE`` those whose numerator and denominator are two attentions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, D = 4, 8
WIDTH = HEADS * D
EPS = 1e-6
LONGEST = 256
"""Length of the masks that are stored."""


@dataclass(frozen=True)
class Formulation:
    """A module as people write it, and what the fused node must say."""

    build: Callable[[], nn.Module]
    inputs: int = 3
    expected: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1
    length: int = 16


CAUSAL: dict[str, Formulation] = {}
BIDIRECTIONAL: dict[str, Formulation] = {}
OTHER: dict[str, Formulation] = {}
SEPARATE: dict[str, Formulation] = {}

Function = Callable[..., Tensor]


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the function says."""
        return self.function(*inputs)


def formulation(
    table: dict[str, Formulation],
    inputs: int = 3,
    nodes: int = 1,
    length: int = 16,
    **expected: Any,
) -> Callable[[Any], Any]:
    """Register a function of query, key and value, or a module class."""

    def register(written: Any) -> Any:
        build = written if isinstance(written, type) else lambda: Call(written)
        table[written.__name__.lower()] = Formulation(build, inputs, expected, nodes, length)
        return written

    return register


def phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def split(x: Tensor) -> Tensor:
    """(B, T, H, d)."""
    return x.unflatten(-1, (HEADS, -1))


def heads_first(x: Tensor) -> Tensor:
    """(B, H, T, d)."""
    return split(x).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, d) packed."""
    return x.transpose(1, 2).flatten(2)


ELU = {"query_map": "elu1", "key_map": "elu1"}
NORMALISED = {"normalize": True, "eps": EPS, **ELU}


@formulation(CAUSAL, **NORMALISED)
def cumsum_outer(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
    top = (q.unsqueeze(-2) @ states).squeeze(-2)
    return (top / ((q * k.cumsum(1)).sum(-1, keepdim=True) + EPS)).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def cumsum_einsum(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    kv = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=2)
    z = 1 / (torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(dim=2)) + EPS)
    return merge(torch.einsum("bhnd,bhnde,bhn->bhne", q, kv, z))


@formulation(CAUSAL, **NORMALISED)
def cumsum_column_vectors(q, k, v):
    """Queries as matrices of one column, which an index takes out again."""
    q, k, v = (split(x).permute(1, 0, 2, 3) for x in (phi(q), phi(k), v))
    state = torch.cumsum(v[..., :, None] * k[..., None, :], dim=0)
    over = 1 / ((q * k.cumsum(0)).sum(-1, keepdim=True) + EPS)
    return ((state @ q[..., None])[..., 0] * over).permute(1, 0, 2, 3).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def cumsum_value_first(q, k, v):
    """The state transposed: (e, d), time in front."""
    q, k, v = (split(x).permute(1, 0, 2, 3) for x in (phi(q), phi(k), v))
    state = torch.cumsum(v[..., :, None] * k[..., None, :], dim=0)
    out = (state * q[..., None, :]).sum(-1)
    den = torch.einsum("tbhd,tbhd->tbh", q, torch.cumsum(k, 0)) + EPS
    return (out / den[..., None]).permute(1, 0, 2, 3).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def normaliser_before(q, k, v):
    """Queries are divided first."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    den = (q * torch.cumsum(k, 1)).sum(-1, keepdim=True) + EPS
    q = q / den
    kv = torch.cumsum(torch.einsum("bthd,bthe->bthde", k, v), dim=1)
    return torch.einsum("bthd,bthde->bthe", q, kv).flatten(2)


@formulation(CAUSAL, **NORMALISED)
def tril_scores(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **NORMALISED)
def normalised_scores(q, k, v):
    """Scores are divided by their sum before they meet the values."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = torch.tril(torch.einsum("bhid,bhjd->bhij", q, k))
    weights = scores / (scores.sum(dim=-1, keepdim=True) + EPS)
    return merge(torch.einsum("bhij,bhjd->bhid", weights, v))


@formulation(CAUSAL, **NORMALISED)
def ones_tril_product(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    length = q.shape[2]
    mask = torch.ones(length, length, device=q.device).tril()
    scores = (q @ k.mT) * mask
    return merge((scores @ v) / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **NORMALISED)
def masked_fill(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    length = q.shape[2]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    scores = (q @ k.transpose(-2, -1)).masked_fill(mask, 0.0)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **NORMALISED)
def where_positions(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    t = torch.arange(q.shape[1], device=q.device)
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    scores = torch.where(t[:, None] >= t[None, :], scores, torch.zeros_like(scores))
    out = torch.einsum("bhts,bshe->bthe", scores, v)
    return (out / (scores.sum(-1).transpose(1, 2).unsqueeze(-1) + EPS)).flatten(2)


class TrilBuffer(nn.Module):
    """The mask is a buffer, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril()[None, None])

    def forward(self, q, k, v):
        q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
        length = q.shape[2]
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:, :, :length, :length] == 0, 0)
        return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


formulation(CAUSAL, **NORMALISED)(TrilBuffer)


@formulation(CAUSAL, normalize=False, scale=1.0, query_map=None)
def plain_unnormalised(q, k, v):
    """No feature map, a scale."""
    q, k, v = heads_first(q) * D**-0.5, heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril() @ v)


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


@formulation(CAUSAL, **NORMALISED)
def ones_column(q, k, v):
    """The normaliser as one more value channel."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    v = F.pad(v, (0, 1), value=1.0)
    kv = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
    out = torch.einsum("bthd,bthde->bthe", q, kv)
    return (out[..., :-1] / (out[..., -1:] + EPS)).flatten(2)


@formulation(CAUSAL, length=64, **NORMALISED)
def chunks(q, k, v):
    """Blocks of 16, padded: a cumulated state between them, a triangle inside."""
    size, length = 16, q.shape[1]
    count = (length + size - 1) // size
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    q, k, v = (
        F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size)) for x in (q, k, v)
    )
    state = torch.einsum("bhnsd,bhnse->bhnde", k, v)
    before = state.cumsum(2) - state
    z = k.sum(3)
    z_before = z.cumsum(2) - z
    scores = torch.einsum("bhntd,bhnsd->bhnts", q, k).tril()
    out = scores @ v + q @ before
    den = scores.sum(-1) + (q @ z_before.unsqueeze(-1)).squeeze(-1)
    out = (out / (den + EPS).unsqueeze(-1)).flatten(2, 3)[:, :, :length]
    return merge(out)


@formulation(CAUSAL, length=64, normalize=False)
def chunks_of_a_multiple(q, k, v):
    """The same where the length is a multiple of the chunk, unnormalised."""
    size = 16
    q, k, v = (x.unflatten(1, (-1, size)).unflatten(-1, (HEADS, D)) for x in (q, k, v))
    kv = torch.einsum("bnshd,bnshe->bnhde", k, v)
    before = torch.cumsum(kv, 1) - kv
    inter = torch.einsum("bnthd,bnhde->bnthe", q, before)
    mask = torch.tril(torch.ones(size, size))
    intra = torch.einsum("bnthd,bnshd,ts,bnshe->bnthe", q, k, mask, v)
    return (inter + intra).flatten(1, 2).flatten(2)


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


formulation(CAUSAL, normalize=True, eps=EPS)(MixedCasts)


@formulation(CAUSAL, nodes=2, normalize=False)
def clamped_denominator(q, k, v):
    """A denominator that is clamped: numerator and denominator are fused one by one."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / scores.sum(-1, keepdim=True).clamp(min=EPS))


@formulation(CAUSAL, query_map="relu", key_map="relu", normalize=True, eps=1e-3)
def matmul_ones(q, k, v):
    """The sum over keys as a product with ones, relu by clamp."""
    q, k, v = (heads_first(x) for x in (q.clamp(min=0), k.clamp(min=0), v))
    length = q.shape[2]
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * torch.ones(length, length).tril()
    den = scores @ torch.ones(1, 1, length, 1)
    return merge(scores @ v / (den + 1e-3))


@formulation(CAUSAL, **NORMALISED)
def triangular_product(q, k, v):
    """The cumulative sum as a product with a triangle."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    length = q.shape[1]
    triangle = torch.ones(length, length).tril()
    kv = torch.einsum("ts,bshd,bshe->bthde", triangle, k, v)
    z = torch.einsum("ts,bshd->bthd", triangle, k)
    out = torch.einsum("bthd,bthde->bthe", q, kv)
    return (out / ((q * z).sum(-1, keepdim=True) + EPS)).flatten(2)


def of_scores(q, k, v):
    """Normalised causal attention of features."""
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


def both(kind: str) -> dict[str, Any]:
    return {"normalize": True, "query_map": kind, "key_map": kind}


@formulation(CAUSAL, **both("softmax"))
def softmax_features(q, k, v):
    return of_scores(heads_first(q).softmax(-1), heads_first(k).softmax(-1), heads_first(v))


def taylor(x: Tensor) -> Tensor:
    """1, x and all products of two components."""
    x = x / D**0.25
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs], -1)


@formulation(CAUSAL, **both("taylor2"))
def taylor_features(q, k, v):
    return of_scores(taylor(heads_first(q)), taylor(heads_first(k)), heads_first(v))


def taylor_kernel(t: Tensor) -> Tensor:
    return 1 + t + t * t / 2


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


def products(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, T)."""
    return heads_first(q) @ heads_first(k).transpose(-1, -2)


def over_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Weights of every key over their sum."""
    return merge(weights @ heads_first(v) / (weights.sum(-1, keepdim=True) + EPS))


PLAIN = {"normalize": False}


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


@formulation(SEPARATE, nodes=2, **ELU | {"normalize": False})
def clamped_weights(q, k, v):
    """Divided before the values, by a denominator that is no sum: a factor of every query."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge((scores / scores.sum(-1, keepdim=True).clamp_min(EPS)) @ v)


@formulation(SEPARATE, nodes=2, **ELU | {"normalize": False})
def clamped_einsum(q, k, v):
    """The same as one product of three, as cosFormer has it."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    kv = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
    over = 1 / torch.clamp_min(torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2)), EPS)
    return merge(torch.einsum("bhsd,bhsde,bhs->bhse", q, kv, over))


@formulation(SEPARATE, nodes=2, **both("taylor2") | {"normalize": False})
def taylor_scores_over_others(q, k, v):
    """The denominator is not of the same polynomial."""
    t = heads_first(q) @ heads_first(k).transpose(-1, -2) / math.sqrt(D)
    weights = taylor_kernel(t).tril()
    return merge(weights @ heads_first(v) / (taylor_kernel(2 * t).tril().sum(-1, True) + EPS))


class FrozenProjection(nn.Module):
    """Positive random features whose projection is a buffer, unscaled inputs."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(2 * D, D, generator=torch.Generator().manual_seed(0))
        self.register_buffer("projection", drawn)

    def features(self, x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True) / 2
        projected = x @ self.projection.type_as(x).T
        return torch.exp(projected - norm) / math.sqrt(2 * D)

    def forward(self, q, k, v):
        q, k = (self.features(heads_first(x) / 4) for x in (q, k))
        return of_scores(q, k, heads_first(v))


formulation(CAUSAL, **both("favor+"))(FrozenProjection)


# Bidirectional


@formulation(BIDIRECTIONAL, **NORMALISED)
def matmul_chain(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    out = q @ (k.transpose(-1, -2) @ v)
    den = q @ k.sum(dim=-2, keepdim=True).transpose(-1, -2) + EPS
    return merge(out / den)


@formulation(BIDIRECTIONAL, **NORMALISED)
def einsum_katharopoulos(q, k, v):
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = torch.einsum("nshd,nshm->nhmd", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z).contiguous().flatten(2)


@formulation(BIDIRECTIONAL, **NORMALISED)
def loftr(q, k, v):
    """Values over the length, the result times it."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    length = v.size(1)
    v = v / length
    kv = torch.einsum("nshd,nshv->nhdv", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
    return (torch.einsum("nlhd,nhdv,nlh->nlhv", q, kv, z) * length).flatten(2)


@formulation(BIDIRECTIONAL, query_map="relu", key_map="relu", normalize=True, eps=1e-15)
def litemla(q, k, v):
    """Values padded with ones, channels first."""
    q, k, v = (x.transpose(1, 2).unflatten(1, (HEADS, D)) for x in (q, k, v))
    q, k = F.relu(q), F.relu(k)
    v = F.pad(v, (0, 0, 0, 1), mode="constant", value=1)
    out = torch.matmul(torch.matmul(v, k.transpose(-1, -2)), q)
    out = out[:, :, :-1] / (out[:, :, -1:] + 1e-15)
    return out.flatten(1, 2).transpose(1, 2)


@formulation(BIDIRECTIONAL, normalize=False, query_map="softmax_time", key_map="softmax_time")
def double_softmax(q, k, v):
    """Softmax of queries over channels and of keys over positions."""
    q, k, v = heads_first(q).softmax(-1) * D**-0.5, heads_first(k).softmax(-2), heads_first(v)
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    return merge(torch.einsum("bhnd,bhde->bhne", q, context))


@formulation(BIDIRECTIONAL, normalize=False, query_map="relu", key_map="relu")
def quadratic_unnormalised(q, k, v):
    q, k, v = F.relu(heads_first(q)), F.relu(heads_first(k)), heads_first(v)
    return merge((q @ k.mT) @ v) * 0.5


@formulation(BIDIRECTIONAL, normalize=False)
def galerkin(q, k, v):
    """Divided by the length."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(q @ (k.transpose(-1, -2) @ v) / q.shape[2])


class KeyMask(nn.Module):
    """Padded keys are set to zero with the values."""

    def forward(self, q, k, v):
        keep = v[..., :1].abs() > 0.2
        q, k, v = phi(split(q)), phi(split(k)), split(v)
        k = k.masked_fill(~keep.unsqueeze(-1), 0.0)
        kv = torch.einsum("nshd,nshm->nhmd", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z).flatten(2)


formulation(BIDIRECTIONAL, normalize=True, eps=EPS, query_map="elu1")(KeyMask)


@formulation(BIDIRECTIONAL, masked=True, **NORMALISED)
def score_mask(q, k, v):
    """Padded keys are masked in the scores."""
    keep = v[..., 0] > -1
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None, :], 0.0)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(BIDIRECTIONAL, inputs=1, **NORMALISED)
class SharedProjection(nn.Module):
    """One projection to (3, H, d), unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = phi(q), phi(k)
        out = q @ (k.transpose(-1, -2) @ v) / ((q * k.sum(2, keepdim=True)).sum(-1, True) + EPS)
        return self.out(merge(out))


@formulation(BIDIRECTIONAL, **NORMALISED)
def single_loop(q, k, v):
    """Products and sums only."""
    q, k, v = phi(split(q)), phi(split(k)), split(v)
    kv = (k.unsqueeze(-1) * v.unsqueeze(-2)).sum(1, keepdim=True)
    out = (q.unsqueeze(-1) * kv).sum(-2)
    return (out / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + EPS)).flatten(2)


# What must stay as it is


@formulation(OTHER)
def softmax(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge((q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v)


@formulation(OTHER)
def causal_softmax(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    length = q.shape[2]
    mask = torch.full((length, length), float("-inf")).triu(1)
    return merge((q @ k.transpose(-1, -2) * D**-0.5 + mask).softmax(-1) @ v)


@formulation(OTHER)
def scaled_dot_product(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@formulation(OTHER)
def softmax_by_hand(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    length = q.shape[2]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(later, float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return merge(weights @ v / weights.sum(-1, keepdim=True))


@formulation(OTHER)
def exp_scores(q, k, v):
    """softmax without its maximum."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    weights = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(D)).tril()
    return merge(weights @ v / weights.sum(-1, keepdim=True))


@formulation(OTHER)
def relu_scores(q, k, v):
    """A function of the scores."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(F.relu(q @ k.transpose(-1, -2)).tril() @ v)


@formulation(OTHER)
def matrix_chain(q, k, v):
    """Three matrices, no attention."""
    return q @ (k.transpose(-1, -2) @ v)


@formulation(OTHER)
def window(q, k, v):
    """A band is no triangle."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = (q @ k.transpose(-1, -2)).tril().triu(-4)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(OTHER)
def later_keys(q, k, v):
    """The other triangle."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).triu() @ v)


@formulation(OTHER)
def strict_triangle(q, k, v):
    """Without the diagonal."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    return merge((q @ k.transpose(-1, -2)).tril(-1) @ v)


class RandomMask(nn.Module):
    """A constant mask that is no triangle."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5).float()
        self.register_buffer("mask", mask)

    def forward(self, q, k, v):
        q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
        length = q.shape[2]
        return merge((q @ k.transpose(-1, -2) * self.mask[:length, :length]) @ v)


formulation(OTHER)(RandomMask)


@formulation(OTHER)
def running_mean(q, k, v):
    """A cumulative sum that is no attention."""
    return v.cumsum(1) / (torch.arange(v.shape[1]) + 1).view(1, -1, 1) * torch.sigmoid(q) + k
