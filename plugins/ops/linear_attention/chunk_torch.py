"""Linear attention in differentiable PyTorch, in chunk form.

Shapes: ``spec``; formulas: ``chunk``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.plugins.ops.linear_attention.chunk import PER_CHANNEL_CHUNK
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec

_watched: list[Tensor] | None = None


@contextlib.contextmanager
def watch_denominators() -> Iterator[list[Tensor]]:
    """Collect, while it lasts, the smallest |denominator|, eps included, of every normalised call.

    NaN where one is NaN.
    """
    global _watched
    before, _watched = _watched, []
    try:
        yield _watched
    finally:
        _watched = before


def linear_attention(
    spec: LinearAttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    past_normalizer: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    key_mask: Tensor | None = None,
    decay_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, present_state and present_normalizer.

    The linear rule is written without a loop over chunks, so that a plain export of it keeps a
    dynamic length; decay and delta rules loop, and a plain export of them unrolls.
    """
    inputs = (query, key, value, past_state, past_normalizer, decay, beta, key_mask, decay_scale)
    sizes = spec.check(*(None if x is None else tuple(x.shape) for x in inputs))  # type: ignore[arg-type]
    if decay is not None and decay_scale is not None:
        decay = (decay.unsqueeze(-1) * decay_scale).flatten(2)
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads, batch = spec.kv_num_heads, query.shape[0]

    q = _heads(query.to(dtype) * spec.scale, spec.q_num_heads, spec.output_heads)
    q = q.unflatten(1, (heads, spec.output_heads // heads))
    k = _heads(key.to(dtype), sizes.key_heads, heads)
    v = _heads(value.to(dtype), heads, heads)
    if key_mask is not None:
        k = torch.where(key_mask[:, None, :, None], k, 0.0)
        if decay is not None:
            decay = torch.where(key_mask[:, :, None], decay, 0.0)
    k, v = k.unsqueeze(2), v.unsqueeze(2)

    S = k.new_zeros(batch, heads, 1, sizes.d_k, sizes.d_v)
    z = k.new_zeros(batch, heads, 1, sizes.d_k, 1)
    if past_state is not None:
        S = past_state.to(dtype).unsqueeze(2)
    if past_normalizer is not None:
        z = past_normalizer.to(dtype)[:, :, None, :, None]
    if not spec.causal:
        numerator, denominator, S, z = _bidirectional(q, k, v)
    elif spec.update_rule == "linear":
        numerator, denominator, S, z = _linear(spec, q, k, v, S, z)
    else:
        gates = [None if g is None else _gate(g.to(dtype), heads) for g in (decay, beta)]
        numerator, denominator, S, z = _gated(spec, q, k, v, S, z, *gates)
    output = numerator
    if spec.normalize:
        denominator = denominator + spec.eps
        output = numerator / denominator
        if _watched is not None and denominator.numel():
            _watched.append(denominator.detach().abs().min())
    output = output.flatten(1, 2).transpose(1, 2).flatten(2).to(query.dtype)
    return output, S.squeeze(2), z[:, :, 0, :, 0]


Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""Numerator (B, H_kv, G, T, d_v), denominator (B, H_kv, G, T, 1), state and normaliser."""


def _bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    S = k.transpose(-1, -2) @ v
    z = k.sum(-2).unsqueeze(-1)
    return q @ S, q @ z, S, z


def _linear(
    spec: LinearAttentionSpec, q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor
) -> Parts:
    """All chunks at once; a cumulative sum over chunks gives the state before each of them."""
    length = q.shape[-2]
    # Not -(-length // size): ONNX divides integers towards zero, and this is exported plainly.
    size = spec.chunk_size
    count = (length + size - 1) // size
    if isinstance(length, int):  # not while tracing, where the length is a symbol
        size = max(1, min(size, length))
        count = max(1, (length + size - 1) // size)
    padding = (0, 0, 0, count * size - length)
    q, k, v = (F.pad(x, padding).unflatten(-2, (count, size)) for x in (q, k, v))
    k_t = k.transpose(-1, -2)
    added, added_z = k_t @ v, k_t.sum(-1, keepdim=True)
    states = S.unsqueeze(3) + added.cumsum(3)
    normalizers = z.unsqueeze(3) + added_z.cumsum(3)
    scores = (q @ k_t).tril()
    numerator = q @ (states - added) + scores @ v
    denominator = q @ (normalizers - added_z) + scores.sum(-1, keepdim=True)
    return (
        numerator.flatten(3, 4)[..., :length, :],
        denominator.flatten(3, 4)[..., :length, :],
        states[:, :, :, -1],
        normalizers[:, :, :, -1],
    )


def _gated(
    spec: LinearAttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
) -> Parts:
    """Chunk after chunk, with the triangular system of the delta rule solved in each.

    Formulas: ``chunk``.
    """
    per_channel = decay is not None and decay.shape[-1] > 1
    size = min(spec.chunk_size, PER_CHANNEL_CHUNK) if per_channel else spec.chunk_size
    numerators = [q.new_zeros(*q.shape[:3], 0, v.shape[-1])]
    denominators = [q.new_zeros(*q.shape[:3], 0, 1)]
    for start in range(0, q.shape[-2], size):
        part = slice(start, start + size)
        q_c, k_c, v_c = q[..., part, :], k[..., part, :], v[..., part, :]
        g = torch.zeros_like(k_c[..., :1]) if decay is None else decay[..., part, :]
        pairs = _decay_pairs(g)
        from_start = g.cumsum(-2).exp()
        after = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
        k_rest = (k_c * after.exp()).transpose(-1, -2)
        total = g.sum(-2).exp().unsqueeze(-1)
        if beta is not None:
            step = beta[..., part, :]
            below = (step * _decayed_products(k_c, k_c, pairs)).tril(-1)
            target = step * (v_c - (k_c * from_start) @ S)
            v_c = torch.linalg.solve_triangular(below, target, upper=False, unitriangular=True)
        scores = _decayed_products(q_c, k_c, pairs)
        numerators.append((q_c * from_start) @ S + scores @ v_c)
        denominators.append((q_c * from_start) @ z + scores.sum(-1, keepdim=True))
        S = total * S + k_rest @ v_c
        z = total * z + k_rest.sum(-1, keepdim=True)
    return torch.cat(numerators, -2), torch.cat(denominators, -2), S, z


def _decay_pairs(g: Tensor) -> Tensor:
    """exp(sum of decays in (s, t]) for s <= t, else 0: (..., C, d) to (..., C, C, d).

    The sums are added up rather than subtracted: as precise for strong decay as for weak.
    """
    size = g.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    steps = torch.where(lower.tril(-1)[..., None], g.unsqueeze(-2), 0.0)
    return torch.where(lower[..., None], steps.cumsum(-3), -torch.inf).exp()


def _decayed_products(x: Tensor, k: Tensor, pairs: Tensor) -> Tensor:
    """Sum over channels of x_t k_s pairs_ts: (..., C, C)."""
    if pairs.shape[-1] == 1:
        return (x @ k.transpose(-1, -2)) * pairs[..., 0]
    return ((k.unsqueeze(-3) * pairs) @ x.unsqueeze(-1)).squeeze(-1)


def _heads(packed: Tensor, heads: int, served: int) -> Tensor:
    """(B, T, heads*d) as (B, served, T, d), each head repeated for the heads it serves."""
    split = packed.unflatten(-1, (heads, packed.shape[-1] // heads)).transpose(1, 2)
    return split if heads == served else split.repeat_interleave(served // heads, dim=1)


def _gate(gate: Tensor, heads: int) -> Tensor:
    """(B, T, H*n) or (B, T, 1) as (B, H or 1, 1, T, n)."""
    groups = 1 if gate.shape[-1] == 1 else heads
    return _heads(gate, groups, groups).unsqueeze(2)
