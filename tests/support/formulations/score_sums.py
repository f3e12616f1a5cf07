"""Scores that are a sum of products of queries and keys, under one triangle and for one value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan

from tests.support.formulations.notation import (
    BIDIRECTIONAL,
    CAUSAL,
    COLLECTED,
    EPS,
    HEADS,
    D,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)

TWO = {"d_k": 2 * D, "d_v": D, "normalize": True, "eps": EPS}
PLAIN = {"d_k": 2 * D, "d_v": D, "normalize": False}


def halves(x):
    """Features of Hedgehog, which are positive."""
    return x.softmax(-1), (-x).softmax(-1)


def outer(k, v):
    """Running sums of products of keys and values."""
    return torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)


def decayed(length, rate):
    """Powers of a rate under a triangle."""
    t = torch.arange(length)
    distance = (t[:, None] - t).to(torch.get_default_dtype())
    return torch.where(distance >= 0, rate**distance, 0.0)


@formulation(CAUSAL, **TWO)
def hedgehog_halves(q, k, v):
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    scores = (q1 @ k1.mT + q2 @ k2.mT).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **TWO)
def cosformer_written_out(q, k, v):
    """cos(w (t - s)) of positions as two products."""
    angle = torch.arange(q.shape[1], dtype=q.dtype)[:, None] * 0.01
    q, k, v = F.relu(heads_first(q)), F.relu(heads_first(k)), heads_first(v)
    cos, sin = angle.cos(), angle.sin()
    scores = ((q * cos) @ (k * cos).mT + (q * sin) @ (k * sin).mT).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, **PLAIN)
def real_part_of_complex_features(q, k, v):
    """Re (a + b i)(c - d i) = a c + b d, of phases."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    scores = torch.cos(q) @ torch.cos(k).mT + torch.sin(q) @ torch.sin(k).mT
    return merge(scores.tril() @ v)


@formulation(CAUSAL, **PLAIN)
def a_difference_of_scores(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    scores = q @ k.mT - 0.5 * (F.relu(v) @ F.relu(v).mT)
    return merge(scores.tril() @ v)


@formulation(CAUSAL, d_k=4 * D, normalize=True, eps=1e-3)
def four_products_of_unlike_weight(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    maps = (phi, F.relu, torch.exp, torch.sigmoid)
    scores = sum((i + 1) * f(q) @ f(k).mT for i, f in enumerate(maps)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + 1e-3))


@formulation(CAUSAL, **TWO)
def sums_of_two_cumulative_sums(q, k, v):
    """Numerators and denominators are added one by one."""
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    top = torch.einsum("bhtd,bhtde->bhte", q1, outer(k1, v))
    top = top + torch.einsum("bhtd,bhtde->bhte", q2, outer(k2, v))
    below = (q1 * k1.cumsum(2)).sum(-1) + (q2 * k2.cumsum(2)).sum(-1)
    return merge(top / (below + EPS)[..., None])


@formulation(CAUSAL, **PLAIN)
def a_sum_of_two_outputs(q, k, v):
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    return merge((q1 @ k1.mT).tril() @ v + 2 * ((q2 @ k2.mT).tril() @ v))


@formulation(CAUSAL, update_rule="gated", **PLAIN)
def a_sum_of_scores_that_decays(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    t = torch.arange(q.shape[2])
    decay = torch.where(t[:, None] >= t, 0.9 ** (t[:, None] - t).to(q.dtype), 0.0)
    return merge(((q @ k.mT + phi(q) @ phi(k).mT) * decay) @ v)


@formulation(CAUSAL, **TWO)
def a_number_of_each_query_and_key(q, k, v):
    """The second product is weighed by a gate of the query and one of the key."""
    gate, share = (torch.sigmoid(heads_first(x)[..., :1]) for x in (q, k))
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    scores = (q1 @ k1.mT + gate * (q2 @ k2.mT) * share.mT).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(CAUSAL, d_k=D // 2 + D, normalize=False)
def two_widths(q, k, v):
    """A product of half the channels, and one of all."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    half = slice(D // 2)
    return merge((q[..., half] @ k[..., half].mT + phi(q) @ phi(k).mT).tril() @ v)


@formulation(CAUSAL, **PLAIN)
def one_query_shared_by_heads(q, k, v):
    """The second product has one query and one key for all heads."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    return merge((q @ k.mT + phi(q[:, :1]) @ phi(k[:, :1]).mT).tril() @ v)


@formulation(BIDIRECTIONAL, **TWO)
def hedgehog_halves_of_all(q, k, v):
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    top = q1 @ (k1.mT @ v) + q2 @ (k2.mT @ v)
    below = (q1 * k1.sum(2, keepdim=True) + q2 * k2.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merge(top / (below + EPS))


@formulation(COLLECTED)
def two_states_of_a_loop(q, k, v):
    (q1, q2), (k1, k2), v = halves(split(q)), halves(split(k)), split(v)
    one, two, out = torch.zeros(q.shape[0], HEADS, D, D), torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[1]):
        one = one + k1[:, t, :, :, None] * v[:, t, :, None]
        two = two + k2[:, t, :, :, None] * v[:, t, :, None]
        read = torch.einsum("bhd,bhde->bhe", q1[:, t], one)
        out.append(read + torch.einsum("bhd,bhde->bhe", q2[:, t], two))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def two_normalised_states_of_a_loop(q, k, v):
    (q1, q2), (k1, k2), v = halves(split(q)), halves(split(k)), split(v)
    one, two = (torch.zeros(q.shape[0], HEADS, D, D) for _ in range(2))
    z1, z2, out = torch.zeros(q.shape[0], HEADS, D), torch.zeros(q.shape[0], HEADS, D), []
    for t in range(q.shape[1]):
        one = one + k1[:, t, :, :, None] * v[:, t, :, None]
        two = two + k2[:, t, :, :, None] * v[:, t, :, None]
        z1, z2 = z1 + k1[:, t], z2 + k2[:, t]
        read = (q1[:, t, :, :, None] * one + q2[:, t, :, :, None] * two).sum(-2)
        out.append(read / ((q1[:, t] * z1 + q2[:, t] * z2).sum(-1, keepdim=True) + EPS))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED)
def two_states_of_a_scan(q, k, v):
    (q1, q2), (k1, k2), v = halves(split(q)), halves(split(k)), split(v)

    def step(states, x):
        q1, q2, k1, k2, v = x
        one, two = (
            s + torch.einsum("bhd,bhe->bhde", k, v) for s, k in zip(states, (k1, k2), strict=True)
        )
        read = torch.einsum("bhd,bhde->bhe", q1, one) + torch.einsum("bhd,bhde->bhe", q2, two)
        return (one, two), read

    begin = torch.zeros(q.shape[0], HEADS, D, D)
    _, out = scan(step, (begin, begin.clone()), (q1, q2, k1, k2, v), dim=1)
    return out.flatten(2)


@formulation(COLLECTED, length=64)
def two_products_in_chunks(q, k, v):
    q, k, v = (split(x).unflatten(1, (-1, 16)) for x in (q, k, v))
    pairs = list(zip(halves(q), halves(k), strict=True))
    out = 0.0
    for one, other in pairs:
        kv = torch.einsum("bnshd,bnshe->bnhde", other, v)
        out = out + torch.einsum("bnthd,bnhde->bnthe", one, kv.cumsum(1) - kv)
    scores = sum(torch.einsum("bnthd,bnshd->bnhts", one, other) for one, other in pairs)
    out = out + torch.einsum("bnhts,bnshe->bnthe", scores.tril(), v)
    return out.flatten(1, 2).flatten(2)


@formulation(COLLECTED)
def a_query_of_two_keys(q, k, v):
    """One query meets the sum of two keys."""
    q, k, v = phi(heads_first(q)), heads_first(k), heads_first(v)
    return merge((q @ (phi(k) + F.relu(v)).mT).tril() @ v)


@formulation(COLLECTED)
def strictly_earlier_sums_of_scores(q, k, v):
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    return merge((q1 @ k1.mT + q2 @ k2.mT).tril(-1) @ v)


@formulation(COLLECTED, nodes=2)
def two_quotients(q, k, v):
    """Each product has a denominator of its own: two attentions."""
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    parts = [(a @ b.mT).tril() for a, b in ((q1, k1), (q2, k2))]
    return merge(sum(s @ v / (s.sum(-1, keepdim=True) + EPS) for s in parts))


@formulation(COLLECTED, reason="multiply each with the values, and add the results")
def two_decays_of_one_value(q, k, v):
    """Each product fades at a rate of its own, before the values."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    slow, fast = (decayed(q.shape[2], rate) for rate in (0.9, 0.5))
    return merge(((q @ k.mT) * slow + (phi(q) @ phi(k).mT) * fast) @ v)


@formulation(COLLECTED, nodes=2)
def outputs_of_two_decays(q, k, v):
    """The same behind the values: two attentions."""
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    slow, fast = (decayed(q.shape[2], rate) for rate in (0.9, 0.5))
    return merge(((q @ k.mT) * slow) @ v + ((phi(q) @ phi(k).mT) * fast) @ v)


@formulation(COLLECTED)
def six_products(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    maps = (phi, F.relu, torch.exp, torch.sigmoid, F.softplus, torch.tanh)
    return merge(sum(f(q) @ f(k).mT for f in maps).tril() @ v)


@formulation(COLLECTED)
def a_masked_sum_of_scores(q, k, v):
    """Tokens whose first value is low are no keys."""
    (q1, q2), (k1, k2), v = halves(heads_first(q)), halves(heads_first(k)), heads_first(v)
    kept = (v[:, 0, :, 0] > -1)[:, None, None]
    scores = (q1 @ k1.mT + q2 @ k2.mT).tril().masked_fill(~kept, 0.0)
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


@formulation(COLLECTED)
def eight_products_over_their_sum(q, k, v):
    q, k, v = phi(heads_first(q)), phi(heads_first(k)), heads_first(v)
    powers = range(1, 9)
    scores = sum((q / p).exp() @ (k / p).sigmoid().mT for p in powers).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))
