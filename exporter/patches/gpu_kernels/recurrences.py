"""Recurrences over tokens: a loop as the original has it, and linexport's op as a trace has it.

    linear       S_t = exp(g_t) S_{t-1} + k_t v_t^T
    delta        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
    generalized  S_t = exp(w_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T

and o_t = scale S_t^T q_t. q and k (B, T, H, K), v (B, T, HV, V), a head of q and k for HV / H heads
of v in a row; g (B, T, HV) or (B, T, HV, K), beta (B, T, HV), the state S (B, HV, K, V).
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.models import functional
from linexport.patches.gpu_kernels import is_traced

Found = tuple[Tensor, Tensor]
"""Output (B, T, HV, V) and last state (B, HV, K, V)."""


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    state: Tensor | None = None,
) -> Found:
    """Return output and last state of the first recurrence."""
    return _run("linear" if g is None else "gated", q, k, v, g, None, scale, state)


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    state: Tensor | None = None,
) -> Found:
    """Return output and last state of the second recurrence."""
    return _run("delta" if g is None else "gated_delta", q, k, v, g, beta, scale, state)


def _run(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    state: Tensor | None,
) -> Found:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dtype, heads = v.dtype, v.shape[2]
    q, k, v = wide(q), wide(k), wide(v)
    g, beta, state = (None if x is None else wide(x) for x in (g, beta, state))
    if not is_traced():
        output, last = _loop(q, k, v, g, beta, scale, state)
        return output.to(dtype), last
    output, last, _ = functional.linear_attention(
        q.flatten(2),
        k.flatten(2),
        v.flatten(2),
        state,
        decay=None if g is None else g.flatten(2),
        beta=beta,
        q_num_heads=q.shape[2],
        kv_num_heads=heads,
        update_rule=rule,
        scale=scale,
    )
    return output.unflatten(2, (heads, -1)).to(dtype), last


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    state: Tensor | None,
) -> Found:
    batch, tokens, heads, _ = v.shape
    q, k = heads_of(q, heads), heads_of(k, heads)
    S = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1]) if state is None else state
    outputs = []
    for t in range(tokens):
        key, value = k[:, t], v[:, t]
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhkv,bhk->bhv", S, key))
        S = S + key[..., None] * value[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * scale)
    return torch.stack(outputs, 1), S


def generalized(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    state: Tensor | None = None,
) -> Found:
    """Return output and last state of the third recurrence, with q called r; all (B, T, H, d)."""
    dtype, heads = v.dtype, r.shape[2]
    r, w, k, v, a, b = map(wide, (r, w, k, v, a, b))
    if is_traced():
        output, last = functional.generalized_delta_rule(
            r.flatten(2),
            k.flatten(2),
            v.flatten(2),
            w.flatten(2),
            a.flatten(2),
            b.flatten(2),
            state,
            num_heads=heads,
            scale=float(scale),
        )
        return output.unflatten(2, (heads, -1)).to(dtype), last
    S = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1]) if state is None else wide(state)
    outputs = []
    for t in range(v.shape[1]):
        read = torch.einsum("bhkv,bhk->bhv", S, a[:, t])
        S = S * w[:, t].exp()[..., None] + b[:, t][..., None] * read[..., None, :]
        S = S + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, r[:, t]) * scale)
    return torch.stack(outputs, 1).to(dtype), S


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Return (B, T, heads, K) of (B, T, H, K): a head for several in a row."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, as the kernels compute; float64 remains."""
    return x.float() if x.itemsize < 4 else x
