"""Several attentions in one layer, chunks with a shifted state, delta rules, windows of softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import (
    COLLECTED,
    EPS,
    HEADS,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


def attend(q, k, v):
    scores = (q @ k.transpose(-1, -2)).tril()
    return scores @ v / (scores.sum(-1, keepdim=True) + EPS)


@formulation(COLLECTED, nodes=2)
def two_in_a_row(q, k, v):
    """The second's values are the first's results."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    return merge(attend(k, q, attend(q, k, v)))


@formulation(COLLECTED, nodes=3)
def three_in_a_row(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    return merge(attend(q, q, attend(k, q, attend(q, k, v))))


@formulation(COLLECTED, nodes=2)
def second_reads_the_first(q, k, v):
    """The second's queries and keys are features of the first's results."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    y = attend(q, k, v)
    return merge(attend(phi(y), phi(y), v))


@formulation(COLLECTED, nodes=2)
def sum_of_two(q, k, v):
    """Two attentions, of other features, added."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge(attend(phi(q), phi(k), v) + attend(q.exp(), k.exp(), v))


@formulation(COLLECTED, nodes=2)
def difference_of_two(q, k, v):
    """Differential attention with linear maps."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return merge(attend(phi(q1), phi(k1), v) - 0.3 * attend(phi(q2), phi(k2), v))


@formulation(COLLECTED, length=64)
def chunks_with_a_padded_state(q, k, v):
    """The state before a chunk: the running sum of states, shifted by a Pad."""
    size = 16
    q, k, v = (x.unflatten(1, (-1, size)).unflatten(-1, (HEADS, D)) for x in (q, k, v))
    states = torch.einsum("bnshd,bnshe->bnhde", k, v).cumsum(1)
    before = F.pad(states, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    inter = torch.einsum("bnthd,bnhde->bnthe", q, before)
    scores = torch.einsum("bnthd,bnshd->bnhts", q, k).tril()
    intra = torch.einsum("bnhts,bnshe->bnthe", scores, v)
    return (inter + intra).flatten(1, 2).flatten(2)


@formulation(COLLECTED, length=64)
def chunks_with_a_concatenated_state(q, k, v):
    """lucidrains: cat of a zero state and all but the last running sum."""
    size = 16
    q, k, v = (phi(x.unflatten(1, (-1, size)).unflatten(-1, (HEADS, D))) for x in (q, k, v))
    states = torch.einsum("bnshd,bnshe->bnhde", k, v).cumsum(1)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    inter = torch.einsum("bnthd,bnhde->bnthe", q, before)
    scores = torch.einsum("bnthd,bnshd->bnhts", q, k).tril()
    intra = torch.einsum("bnhts,bnshe->bnthe", scores, v)
    return (inter + intra).flatten(1, 2).flatten(2)


@formulation(COLLECTED, length=64)
def chunks_with_decay(q, k, v):
    """Chunks of a constant decay: within, between, and of the state."""
    size, rate = 16, 0.9
    q, k, v = (x.unflatten(1, (-1, size)).unflatten(-1, (HEADS, D)) for x in (q, k, v))
    n, t = torch.arange(q.shape[1]), torch.arange(size)
    weights = torch.einsum("bnshd,bnshe,s->bnhde", k, v, rate ** (size - 1 - t.to(v.dtype)))
    between = (rate**size) ** (n[:, None] - n - 1).clamp(min=0).to(v.dtype)
    before = torch.einsum("nm,bmhde->bnhde", between.tril(-1), weights)
    inter = torch.einsum("bnthd,bnhde,t->bnthe", q, before, rate ** (t + 1.0))
    within = (rate ** (t[:, None] - t).clamp(min=0).to(v.dtype)).tril()
    scores = torch.einsum("bnthd,bnshd->bnhts", q, k) * within
    intra = torch.einsum("bnhts,bnshe->bnthe", scores, v)
    return (inter + intra).flatten(1, 2).flatten(2)


@formulation(COLLECTED, length=64)
def chunks_with_decays_of_heads(q, k, v):
    """RetNet's chunks without a loop: a rate for each head."""
    size, rate = 16, 1 - 2.0 ** (-2 - torch.arange(HEADS).to(v.dtype))
    q, k, v = (x.unflatten(1, (-1, size)).unflatten(-1, (HEADS, D)) for x in (q, k, v))
    n, t = torch.arange(q.shape[1]), torch.arange(size)
    inner = rate[:, None] ** (size - 1 - t.to(v.dtype))
    weights = torch.einsum("bnshd,bnshe,hs->bnhde", k, v, inner)
    apart = (n[:, None] - n - 1).clamp(min=0).to(v.dtype)
    between = (rate**size)[:, None, None] ** apart
    before = torch.einsum("hnm,bmhde->bnhde", between.tril(-1), weights)
    inter = torch.einsum("bnthd,bnhde,ht->bnthe", q, before, rate[:, None] ** (t + 1.0))
    within = (rate[:, None, None] ** (t[:, None] - t).clamp(min=0).to(v.dtype)).tril()
    scores = torch.einsum("bnthd,bnshd->bnhts", q, k) * within
    intra = torch.einsum("bnhts,bnshe->bnthe", scores, v)
    return (inter + intra).flatten(1, 2).flatten(2)


@formulation(COLLECTED)
def delta_rule_by_a_solve(q, k, v):
    """u = (I + tril(beta k k^T, -1))^-1 beta v, then causal attention over u."""
    beta = torch.sigmoid(split(q).mean(-1)).transpose(1, 2)[..., None]
    q, k, v = heads_first(q), F.normalize(heads_first(k), dim=-1), heads_first(v)
    lower = (beta * (k @ k.transpose(-1, -2))).tril(-1)
    eye = torch.eye(q.shape[2])
    u = torch.linalg.solve_triangular(eye + lower, beta * v, upper=False, unitriangular=True)
    return merge((q @ k.transpose(-1, -2)).tril() @ u)


@formulation(COLLECTED)
def delta_rule_by_an_inverse(q, k, v):
    """The same with torch.inverse."""
    beta = torch.sigmoid(split(q).mean(-1)).transpose(1, 2)[..., None]
    q, k, v = heads_first(q), F.normalize(heads_first(k), dim=-1), heads_first(v)
    lower = (beta * (k @ k.transpose(-1, -2))).tril(-1)
    inverse = torch.inverse(torch.eye(q.shape[2]) + lower)
    return merge((q @ k.transpose(-1, -2)).tril() @ (inverse @ (beta * v)))


@formulation(COLLECTED, reason="A Python loop over tokens")
def delta_rule_by_a_loop(q, k, v):
    """Forward substitution, row by row."""
    beta = torch.sigmoid(split(q).mean(-1)).transpose(1, 2)[..., None]
    q, k, v = heads_first(q), F.normalize(heads_first(k), dim=-1), heads_first(v)
    lower = (beta * (k @ k.transpose(-1, -2))).tril(-1)
    rows = [beta[:, :, 0] * v[:, :, 0]]
    for t in range(1, q.shape[2]):
        known = torch.stack(rows, 2)
        rows.append(
            beta[:, :, t] * v[:, :, t] - torch.einsum("bhs,bhse->bhe", lower[:, :, t, :t], known)
        )
    return merge((q @ k.transpose(-1, -2)).tril() @ torch.stack(rows, 2))


@formulation(COLLECTED)
def hybrid_with_full_softmax(q, k, v):
    """Linear attention, then causal softmax attention."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    y = attend(phi(q), phi(k), v)
    return merge(F.scaled_dot_product_attention(q, k, y, is_causal=True))


@formulation(COLLECTED)
def hybrid_with_a_window(q, k, v):
    """Based: linear attention, then softmax over the last eight tokens."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    y = attend(phi(q), phi(k), v)
    t = torch.arange(q.shape[2])
    apart = t[:, None] - t
    near = (apart >= 0) & (apart < 8)
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~near, -torch.inf)
    return merge(scores.softmax(-1) @ y)


class Residual(nn.Module):
    """Two layers with norms, projections and residuals around their attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inside = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, q, k, v):
        x = q + k + v
        for norm, inside, out in zip(self.norms, self.inside, self.out, strict=True):
            a, b, c = map(heads_first, inside(norm(x)).chunk(3, -1))
            x = x + out(merge(attend(phi(a), phi(b), c)))
        return x


formulation(COLLECTED, nodes=2)(Residual)


@formulation(COLLECTED)
def attention_with_a_group_norm(q, k, v):
    """RetNet's output: normalised head by head, gated."""
    gate = F.silu(v)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    y = ((q @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2)
    return F.layer_norm(y, (D,)).flatten(2) * gate


@formulation(COLLECTED, nodes=2)
def normalised_by_a_norm(q, k, v):
    """The sums divided by the norm of the summed keys."""
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    z = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return merge((q @ k.transpose(-1, -2)).tril() @ v / z.abs().clamp(min=1.0))


@formulation(COLLECTED)
def scaled_by_root_of_count(q, k, v):
    """Divided by the root of the number of tokens."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    count = torch.arange(1, q.shape[2] + 1).to(v.dtype).sqrt()[:, None]
    return merge((q @ k.transpose(-1, -2)).tril() @ v / count)


@formulation(COLLECTED)
def cosine_reweighted(q, k, v):
    """cosFormer with a fixed horizon."""
    t = torch.arange(q.shape[1]).to(v.dtype)[:, None] * (torch.pi / 2 / 4096)
    q, k, v = F.relu(heads_first(q)), F.relu(heads_first(k)), heads_first(v)
    q, k = (torch.cat([x * t.cos(), x * t.sin()], -1) for x in (q, k))
    return merge(attend(q, k, v))
