"""Softmax attention of fla and flash_attn, and attention of other weights.

    attention      o_t = sum_{s <= t} softmax_s(scale q_t . k_s + G_t - G_s) v_s,   G the sums of g
    forgetting     the same
    wall           scores sum_n q_n k_n exp(P_t,n - P_s,n), P the sums of g for each channel
    parallax       o - sum_s p_s (r . k_s - sum_i p_i r . k_i) v_s,   p the weights of attention
    stick-breaking weights sigmoid(z_s) prod_{s < l <= t} (1 - sigmoid(z_l)), newest first

q (B, T, HQ, K), k and v (B, T, H, K), a head of these for HQ / H of q in a row; g (B, T, HQ). Where
there is a window, the last of its tokens are seen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import GpuKernel
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.recurrences import heads_of, wide


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    sink_bias: Tensor | None = None,
) -> Tensor:
    """Stand in for ``parallel_attn`` and ``parallel_forgetting_attn``."""
    refuse_packed(cu_seqlens)
    dtype = v.dtype
    k, v = heads_of(k, q.shape[2]), heads_of(v, q.shape[2])
    if g is None and window_size is None and sink_bias is None:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return found.transpose(1, 2).to(dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bthk,bshk->bhts", wide(q), wide(k)) * scale
    return _weighted(scores, v, g, window_size, sink_bias).to(dtype)


def wall(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_scalar: Tensor | None = None,
    sink_bias: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Stand in for ``parallel_wall_attn``."""
    refuse_packed(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sums = wide(g).cumsum(1).transpose(1, 2)
    query, key = (wide(heads_of(x, q.shape[2])).transpose(1, 2) for x in (q, k))
    change = (sums[:, :, :, None] - sums[:, :, None]).clamp(max=0.0)  # later keys are not seen
    scores = (query[:, :, :, None] * key[:, :, None] * change.exp()).sum(-1) * scale
    return _weighted(scores, heads_of(v, q.shape[2]), g_scalar, window_size, sink_bias)


def parallax(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Stand in for ``parallel_parallax``."""
    refuse_packed(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (wide(heads_of(x, q.shape[2])) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", wide(q), k) * scale
    weights = scores.masked_fill(~_seen(scores, window_size), -torch.inf).softmax(-1)
    other = torch.einsum("bthk,bshk->bhts", wide(r), k)
    mean = (weights * other).sum(-1, keepdim=True)
    return torch.einsum("bhts,bshv->bthv", weights * (1.0 + mean - other), v).to(q.dtype)


def stick_breaking(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    attend_current: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Stand in for ``parallel_stickbreaking_attn``: also what is left of each stick."""
    refuse_packed(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (wide(heads_of(x, q.shape[2])) for x in (k, v))
    z = torch.einsum("bthk,bshk->bhts", wide(q), k) * scale
    at = torch.arange(z.shape[-1])
    seen = at[None] <= at[:, None] if attend_current else at[None] < at[:, None]
    kept = F.logsigmoid(-z).masked_fill(~seen, 0.0)
    # From the newest key on: of those far back, whose sums are large, hardly anything is left.
    later = kept.flip(-1).cumsum(-1).flip(-1) - kept
    weights = (F.logsigmoid(z) + later).masked_fill(~seen, -torch.inf).exp()
    output = torch.einsum("bhts,bshv->bthv", weights, v).to(q.dtype)
    return output, kept.sum(-1).exp().transpose(1, 2).to(q.dtype)


def _weighted(
    scores: Tensor,
    v: Tensor,
    g: Tensor | None,
    window_size: int | None,
    sink_bias: Tensor | None,
) -> Tensor:
    """Return values (B, T, H, V) weighted by a softmax of scores (B, H, T, S) to earlier tokens."""
    if g is not None:
        sums = wide(g).cumsum(1).transpose(1, 2)
        scores = scores + sums[..., None] - sums[:, :, None]
    scores = scores.masked_fill(~_seen(scores, window_size), -torch.inf)
    if sink_bias is not None:  # a score that no value has
        sink = sink_bias[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, wide(v))


def _seen(scores: Tensor, window_size: int | None) -> Tensor:
    """Return which tokens each sees: those until itself, of which a window has the last."""
    at = torch.arange(scores.shape[-1])
    seen = at[None] <= at[:, None]
    return seen if window_size is None else seen & (at[:, None] - at[None] < window_size)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Stand in for ``flash_attn_func``; nothing drops out in inference."""
    left, right = window_size
    if causal and right <= 0:
        return attention(q, k, v, None, softmax_scale, left + 1 if left >= 0 else None)
    if causal or (left, right) != (-1, -1):
        raise UnsupportedModelError(
            f"flash_attn_func is called with window_size={window_size} and causal={causal}. "
            "Expected a window with causal=True alone, or none."
        )
    query = q.transpose(1, 2)
    key, value = (heads_of(x, q.shape[2]).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(query, key, value, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Stand in for ``flash_attn_varlen_func`` on a batch, as ``padding`` makes it of a mask."""
    refuse_packed(cu_seqlens_q)
    refuse_packed(cu_seqlens_k)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size)


FLA = ("fla",)
SOFTMAX = "softmax attention to earlier tokens"


KERNELS = (
    GpuKernel(FLA, ("parallel_attn",), attention, SOFTMAX, "ops.attn.naive.naive_parallel_attn"),
    GpuKernel(
        FLA,
        ("parallel_forgetting_attn",),
        attention,
        f"{SOFTMAX} that are forgotten",
        "ops.forgetting_attn.naive.naive_forgetting_attn",
    ),
    GpuKernel(FLA, ("parallel_wall_attn",), wall, f"{SOFTMAX}, whose channels decay"),
    GpuKernel(
        FLA,
        ("parallel_parallax",),
        parallax,
        f"{SOFTMAX} with a correction of first order",
        "ops.parallax.naive.naive_parallax",
    ),
    GpuKernel(
        FLA,
        ("parallel_stickbreaking_attn",),
        stick_breaking,
        "stick-breaking attention to earlier tokens",
        "ops.stickbreaking_attn.naive.naive_stickbreaking_attn",
    ),
    GpuKernel(("flash_attn",), ("flash_attn_func",), flash_attn_func, "softmax attention"),
    GpuKernel(
        ("flash_attn",), ("flash_attn_varlen_func",), flash_attn_varlen_func, "softmax attention"
    ),
)
