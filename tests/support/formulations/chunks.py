"""Causal attention in blocks: a state between them, a triangle inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.formulations.decayed import segsum
from tests.support.formulations.notation import (
    CAUSAL,
    COLLECTED,
    EPS,
    HEADS,
    NORMALISED,
    D,
    formulation,
    heads_first,
    merge,
    phi,
    split,
)


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


@formulation(COLLECTED, length=64, reason="write the size in its place")
def chunks_beside_a_size_that_is_left_over(q, k, v):
    """Of 5 tokens, it has one chunk of 4 with heads of 10 channels in place of 8."""
    q, k, v = (heads_first(x).reshape(x.shape[0], HEADS, x.shape[1] // 4, 4, -1) for x in (q, k, v))
    states = F.pad((k.mT @ v).cumsum(2), (0, 0, 0, 0, 1, -1))
    out = q @ states + (q @ k.mT).tril() @ v
    return merge(out.reshape(*out.shape[:2], out.shape[2] * 4, -1))


@formulation(COLLECTED, length=64)
def ssd_minimal_discrete(q, k, v):
    """Mamba-2's published listing: chunks, their states and those between, without a loop."""
    q, k, v = (split(x).unflatten(1, (-1, 16)) for x in (q, k, v))
    steps = -F.softplus(q.mean(-1)).permute(0, 3, 1, 2)
    since = torch.cumsum(steps, dim=-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", q, k, torch.exp(segsum(steps)), v)
    left = torch.exp(since[:, :, :, -1:] - since)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", k, left, v)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    decay = torch.exp(segsum(F.pad(since[:, :, :, -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", decay, states)[:, :-1]
    between = torch.einsum("bclhn,bchpn,bhcl->bclhp", q, states, torch.exp(since))
    return (within + between).flatten(1, 2).flatten(2)


@formulation(COLLECTED, length=64)
def chunks_with_gates(q, k, v):
    """States of chunks by a triangle of the decays between them."""
    q, k, v = (heads_first(x).unflatten(2, (-1, 16)) for x in (q, k, v))
    total = (F.logsigmoid(q.mean(-1)) / 4).cumsum(-1)
    within = (q @ k.mT) * torch.exp((total[..., None] - total[..., None, :]).tril()).tril()
    last = total[..., -1]
    states = (k * (last[..., None] - total).exp()[..., None]).mT @ v
    sums = F.pad(last.cumsum(-1), (1, 0))
    apart = sums[..., :-1, None] - sums[..., None, 1:]
    later = torch.ones(apart.shape[-1], apart.shape[-1], dtype=torch.bool).triu()
    before = torch.einsum("bhnm,bhmde->bhnde", apart.masked_fill(later, -torch.inf).exp(), states)
    return merge((within @ v + (q * total.exp()[..., None]) @ before).flatten(2, 3))


@formulation(COLLECTED, length=64)
def loop_over_chunks(q, k, v):
    """A Python loop hands the state from chunk to chunk."""
    q, k, v = (heads_first(x).unflatten(2, (-1, 16)) for x in (q, k, v))
    state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[2]):
        scores = (q[:, :, n] @ k[:, :, n].mT).tril()
        out.append(q[:, :, n] @ state + scores @ v[:, :, n])
        state = state + k[:, :, n].mT @ v[:, :, n]
    return merge(torch.stack(out, 2).flatten(2, 3))


@formulation(COLLECTED, length=64)
def loop_over_gated_chunks(q, k, v):
    """GLA: a decay for each channel, within chunks as quotients of products."""
    g = F.logsigmoid(heads_first(q)) / 4
    q, k, v, g = (x.unflatten(2, (-1, 16)) for x in (*map(heads_first, (q, k, v)), g))
    total = g.cumsum(3)
    state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[2]):
        query, key, value, since = (x[:, :, n] for x in (q, k, v, total))
        read = query * since.exp()
        out.append(read @ state + (read @ (key * (-since).exp()).mT).tril() @ value)
        last = since[:, :, -1]
        faded = key * (last[:, :, None] - since).exp()
        state = state * last[..., None].exp() + faded.mT @ value
    return merge(torch.stack(out, 2).flatten(2, 3))


@formulation(COLLECTED, length=64)
def loop_over_chunks_of_products(q, k, v):
    """GLA with products of gates in a chunk, which keys are divided by, and a faded sum."""
    gates = heads_first(q).sigmoid() ** 0.25
    q, k, v, gates = (x.unflatten(2, (-1, 16)) for x in (*map(heads_first, (q, k, v)), gates))
    state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[2]):
        decay = gates[:, :, n].cumprod(2)
        read, kept = q[:, :, n] * decay, k[:, :, n] / decay
        out.append(read @ state + (read @ kept.mT).tril() @ v[:, :, n])
        state = decay[:, :, -1, :, None] * (state + kept.mT @ v[:, :, n])
    return merge(torch.stack(out, 2).flatten(2, 3))


@formulation(COLLECTED, length=64)
def loop_over_chunks_in_heads_of_tokens(q, k, v):
    """Retention in einsums: one view makes chunks and heads of (B, T, WIDTH)."""
    size, kept = 16, 0.9
    q, k, v = (x.view(x.shape[0], x.shape[1] // size, size, HEADS, D) for x in (q, k, v))
    place = torch.arange(size)
    between = torch.where(
        torch.ones(size, size).tril() > 0,
        kept ** (place[:, None] - place[None, :]).clamp(min=0).float(),
        0.0,
    ).to(q)
    before = (kept ** (place + 1).float()).to(q)[:, None, None]
    behind = (kept ** (size - 1 - place).float()).to(q)[:, None, None]
    state, out = q.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[1]):
        scores = torch.einsum("blhd,bmhd->bhlm", q[:, n], k[:, n]) * between
        inside = torch.einsum("bhlm,bmhe->blhe", scores, v[:, n])
        out.append(inside + torch.einsum("blhd,bhde->blhe", q[:, n] * before, state))
        written = torch.einsum("blhd,blhe->bhde", k[:, n] * behind, v[:, n])
        state = kept**size * state + written
    return torch.cat(out, 1).flatten(2)
