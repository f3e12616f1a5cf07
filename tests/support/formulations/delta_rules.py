"""The delta rule as people write it: by tokens, by triangular systems, and in chunks.

S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,   o_t = S_t^T q_t
"""

from __future__ import annotations

from functools import wraps

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

CHUNK = 16


def parts(q, k, v):
    """Queries, unit keys, values and rates of writing, heads first."""
    beta = torch.sigmoid(split(q).mean(-1)).transpose(1, 2)
    return heads_first(q), F.normalize(heads_first(k), dim=-1), heads_first(v), beta


def chunks(x):
    """(B, H, T, ...) as (B, H, T / CHUNK, CHUNK, ...)."""
    return x.unflatten(2, (-1, CHUNK))


def below(diagonal):
    """True below the diagonal, on it, or above."""
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(diagonal)


@formulation(COLLECTED)
def delta_rule_by_tokens(q, k, v):
    """The definition."""
    q, k, v, beta = parts(q, k, v)
    state, out = torch.zeros(q.shape[0], HEADS, D, D), []
    for t in range(q.shape[2]):
        key = k[:, :, t]
        known = torch.einsum("bhd,bhde->bhe", key, state)
        new = beta[:, :, t, None] * (v[:, :, t] - known)
        state = state + torch.einsum("bhd,bhe->bhde", key, new)
        out.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return merge(torch.stack(out, 2))


@formulation(COLLECTED)
def gated_delta_rule_by_tokens(q, k, v):
    """transformers: torch_recurrent_gated_delta_rule, its state transposed by nobody."""
    g = F.logsigmoid(split(v).mean(-1) + 2).transpose(1, 2)
    q, k, v, beta = parts(q, k, v)
    q = q * D**-0.5
    out = torch.zeros_like(v)
    state = torch.zeros(q.shape[0], HEADS, D, D)
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None]
        known = (state * k[:, :, t].unsqueeze(-1)).sum(dim=-2)
        delta = (v[:, :, t] - known) * beta[:, :, t].unsqueeze(-1)
        state = state + k[:, :, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, :, t] = (state * q[:, :, t].unsqueeze(-1)).sum(dim=-2)
    return merge(out)


@formulation(COLLECTED, length=64)
def delta_rule_in_chunks(q, k, v):
    """flash-linear-attention: rows of the inverse one by one, a loop over chunks."""
    q, k, v, beta = parts(q, k, v)
    v, k_beta = v * beta[..., None], k * beta[..., None]
    q, k, v, k_beta = map(chunks, (q, k, v, k_beta))
    attn = -(k_beta @ k.transpose(-1, -2)).masked_fill(~below(-1), 0)
    for i in range(1, CHUNK):
        attn[..., i, :i] = attn[..., i, :i] + (
            attn[..., i, :, None].clone() * attn[..., :, :i].clone()
        ).sum(-2)
    attn = attn + torch.eye(CHUNK)
    u, w = attn @ v, attn @ k_beta
    state = k.new_zeros(q.shape[0], HEADS, D, D)
    o = torch.zeros_like(v)
    for i in range(q.shape[2]):
        q_i, k_i = q[:, :, i], k[:, :, i]
        inner = (q_i @ k_i.transpose(-1, -2)).masked_fill(~below(0), 0)
        u_i = u[:, :, i] - w[:, :, i] @ state
        o[:, :, i] = q_i @ state + inner @ u_i
        state = state + k_i.transpose(-1, -2) @ u_i
    return merge(o.flatten(2, 3))


@formulation(COLLECTED, length=64)
def delta_rule_in_chunks_by_a_solve(q, k, v):
    """The same by a triangular system for each chunk."""
    q, k, v, beta = parts(q, k, v)
    q, k, v, beta = map(chunks, (q, k, v, beta[..., None]))
    lower = (beta * (k @ k.mT)).tril(-1) + torch.eye(CHUNK)
    both = torch.cat([beta * v, beta * k], -1)
    u, w = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True).split(D, -1)
    state, out = k.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        scores = (q[:, :, n] @ k[:, :, n].mT).tril()
        out.append(q[:, :, n] @ state + scores @ new)
        state = state + k[:, :, n].mT @ new
    return merge(torch.stack(out, 2).flatten(2, 3))


@formulation(COLLECTED, length=64)
def delta_rule_in_chunks_written_in_place(q, k, v):
    """By an inverse, to which the identity is added in place, as is what a chunk leaves behind."""
    q, k, v, beta = parts(q, k, v)
    q, k, v, beta = map(chunks, (q, k, v, beta[..., None]))
    attn = (beta * (k @ k.mT)).masked_fill_(~below(-1), 0)
    attn += torch.eye(CHUNK)
    attn = torch.inverse(attn)
    u, w = attn @ (beta * v), attn @ (beta * k)
    state, out = k.new_zeros(q.shape[0], HEADS, D, D), []
    for n in range(q.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        scores = (q[:, :, n] @ k[:, :, n].mT).masked_fill_(~below(0), 0)
        out.append(q[:, :, n] @ state + scores @ new)
        state = state + k[:, :, n].mT @ new
    return merge(torch.stack(out, 2).flatten(2, 3))


@formulation(COLLECTED, length=64)
def gated_delta_rule_in_padded_chunks(q, k, v):
    """transformers: torch_chunk_gated_delta_rule."""
    g = F.logsigmoid(split(v).mean(-1) + 2).transpose(1, 2)
    q, k, v, beta = parts(q, k, v)
    length = q.shape[2]
    pad = (CHUNK - length % CHUNK) % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q * D**-0.5, k, v))
    beta, g = F.pad(beta, (0, pad)), F.pad(g, (0, pad))
    v_beta, k_beta = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    shape = (q.shape[0], HEADS, -1, CHUNK)
    q, k, k_beta, v_beta = (x.reshape(*shape, D) for x in (q, k, k_beta, v_beta))
    g = g.reshape(shape).cumsum(dim=-1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    attn = -((k_beta @ k.transpose(-1, -2)) * decay).masked_fill(below(0).mT, 0)
    for i in range(1, CHUNK):
        row, sub = attn[..., i, :i].clone(), attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(CHUNK, dtype=attn.dtype)
    value = attn @ v_beta
    k_cumdecay = attn @ (k_beta * g.exp().unsqueeze(-1))
    state = q.new_zeros(q.shape[0], HEADS, D, D)
    out = torch.zeros_like(value)
    for i in range(0, out.shape[2]):
        q_i, k_i, v_i = q[:, :, i], k[:, :, i], value[:, :, i]
        inner = (q_i @ k_i.transpose(-1, -2) * decay[:, :, i]).masked_fill(below(-1).mT, 0)
        v_new = v_i - k_cumdecay[:, :, i] @ state
        out[:, :, i] = (q_i * g[:, :, i, :, None].exp()) @ state + inner @ v_new
        last = g[:, :, i, -1, None]
        state = (
            state * last.unsqueeze(-1).exp()
            + (k_i * (last - g[:, :, i]).exp()[..., None]).transpose(-1, -2) @ v_new
        )
    return merge(out.reshape(q.shape[0], HEADS, -1, D)[:, :, :length])


def by_tokens(step):
    """A recurrence like the delta rule, whose step is another."""

    @wraps(step)
    def written(q, k, v):
        rate = torch.sigmoid(split(v).mean(-1) + 2).transpose(1, 2)
        q, k, v, beta = parts(q, k, v)
        state, out = torch.zeros(q.shape[0], HEADS, D, D), []
        for t in range(q.shape[2]):
            tokens = (x[:, :, t] for x in (q, k, v, beta[..., None], rate[..., None]))
            read, state = step(state, *tokens)
            out.append(read)
        return merge(torch.stack(out, 2))

    return written


def read(state, x):
    return (state * x[..., None]).sum(-2)


def outer(k, v):
    return k[..., None] * v[..., None, :]


@formulation(COLLECTED)
@by_tokens
def delta_rule_with_the_other_sign(state, q, k, v, beta, rate):
    """What is stored is added once more instead of taken away."""
    state = state + outer(k, beta * (v + read(state, k)))
    return read(state, q), state


@formulation(COLLECTED)
@by_tokens
def delta_rule_that_fades_late(state, q, k, v, beta, rate):
    """The correction reads the state before it faded."""
    new = beta * (v - read(state, k))
    state = rate[..., None] * state + outer(k, new)
    return read(state, q), state


@formulation(COLLECTED)
@by_tokens
def delta_rule_read_before_writing(state, q, k, v, beta, rate):
    """Queries meet the state of the token before."""
    return read(state, q), state + outer(k, beta * (v - read(state, k)))


@formulation(COLLECTED)
@by_tokens
def delta_rule_of_half_the_values(state, q, k, v, beta, rate):
    """Beta scales what is taken away, not what is written."""
    state = state + outer(k, v - beta * read(state, k))
    return read(state, q), state


@formulation(COLLECTED, reason="not linear in its state: Clip is computed of it")
@by_tokens
def delta_rule_with_a_bound(state, q, k, v, beta, rate):
    """A bound that random values never reach."""
    state = (state + outer(k, beta * (v - read(state, k)))).clamp(-1e3, 1e3)
    return read(state, q), state


@formulation(COLLECTED)
@by_tokens
def delta_rule_with_a_rate(state, q, k, v, beta, rate):
    """The decay is a number between 0 and 1, not a logarithm."""
    state = state * rate[..., None]
    state = state + outer(k, beta * (v - read(state, k)))
    return read(state, q), state


@formulation(COLLECTED)
@by_tokens
def delta_rule_without_beta(state, q, k, v, beta, rate):
    """Whatever a key had stored is replaced."""
    state = state + outer(k, v - read(state, k))
    return read(state, q), state


@formulation(COLLECTED, reason="not seen to be triangular")
def inverse_of_any_matrix(q, k, v):
    scores = heads_first(q) @ heads_first(k).mT
    return merge(torch.inverse(scores + torch.eye(q.shape[1])) @ heads_first(v))
