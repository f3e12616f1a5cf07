"""Linear attention of fla: gla, simple_gla, linear_attn, retention, lightning_attn, hgrn, based.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t

q and k (B, T, H, K), v (B, T, H, V), g (B, T, H) or (B, T, H, K); without a g nothing is forgotten.
hgrn is h_t = exp(g_t) h_{t-1} + x_t of each channel. based and rebased have keys and queries of
their products: 1 + x + x^2 / 2 and x^2 of x = q . k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.patches.gpu_kernels import GpuKernel, compare
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.recurrences import linear, wide

Result = tuple[Tensor, Any]
"""Output, and the last state where the caller takes it."""


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    gk: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_gla`` and its other forms, whose decays are per key channel."""
    decay = g if gk is None else gk
    return simple_gla(
        q, k, v, decay, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_simple_gla`` and its other forms, whose decays are per head."""
    refuse_packed(cu_seqlens)
    if g_gamma is not None:
        gamma = g_gamma.expand(v.shape[:3])
        g = gamma if g is None else g + gamma
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = initial_state
    state = state.transpose(-1, -2) if state_v_first and state is not None else state
    output, last = linear(q, k, v, g, scale, state)
    if g is not None and g.dim() == 4 and scale == q.shape[-1] ** -0.5:
        compare("fla.ops.gla.naive.naive_recurrent_gla", {"q": q, "k": k, "v": v, "gk": g}, output)
    elif g is not None and g.dim() == 3:
        given = {"q": q, "k": k, "v": v, "g": g, "scale": scale}
        compare("fla.ops.simple_gla.naive.naive_recurrent_simple_gla", given, output)
    last = last.transpose(-1, -2) if state_v_first else last
    return output, last if output_final_state else None


def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_linear_attn`` and its other forms, divided by q . sum k or not."""
    refuse_packed(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state, norm = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if not normalize:
        output, last = linear(q, k, v, None, scale, state)
        return output, last if output_final_state else None
    output, last, norm = divided(q, k, v, scale, 1e-10, state, norm)
    given = {"q": q, "k": k, "v": v, "scale": scale, "normalize": True}
    compare("fla.ops.linear_attn.naive.naive_recurrent_linear_attn", given, output)
    return output, (last if output_final_state else None, norm)


def divided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    eps: float,
    state: Tensor | None = None,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return linear attention divided by (q . sum k + eps), the last state and the last sum.

    The sum is a column of the state, that of values which are 1.
    """
    whole = torch.cat([wide(v), torch.ones_like(wide(v)[..., :1])], -1)
    if state is not None:
        sums = torch.zeros_like(state[..., :1]) if norm is None else norm.transpose(1, 2).mT
        state = torch.cat([state, sums], -1)
    both, last = linear(q, k, whole, None, scale, state)
    output = both[..., :-1] / (both[..., -1:] + eps)
    return output.to(v.dtype), last[..., :-1], last[..., -1:].mT.transpose(1, 2)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_retention`` and its other forms: head h forgets 2^(-5-h) per token."""
    heads = torch.arange(q.shape[2], dtype=torch.float32)
    gamma = torch.log1p(-torch.exp2(-5.0 - heads))
    return simple_gla(
        q, k, v, None, gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_lightning_attn``: head h of H forgets 8 h / H (1 - layer / layers)."""
    heads = torch.arange(q.shape[2], dtype=torch.float32)
    gamma = -8.0 / q.shape[2] * (1.0 - layer_idx / num_layers) * heads
    return simple_gla(
        q, k, v, None, gamma, scale, initial_state, output_final_state, False, cu_seqlens
    )


def hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_hgrn`` and its other form."""
    refuse_packed(cu_seqlens)
    one = torch.ones_like(x[..., :1])[..., None]
    state = None if initial_state is None else initial_state[..., None, None]
    output, last = linear(one, one, x[..., None], g, 1.0, state)
    compare("fla.ops.hgrn.naive.naive_recurrent_hgrn", {"x": x, "g": g}, output[..., 0])
    return output[..., 0], last[..., 0, 0] if output_final_state else None


def based(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True
) -> Tensor:
    """Stand in for ``parallel_based`` and its other form."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given: dict[str, Any] = {n: x.transpose(1, 2) for n, x in (("q", q), ("k", k), ("v", v))}
    given |= {"scale": scale, "use_norm": use_norm}
    q, k = wide(q) * scale, wide(k)
    ones, half = torch.ones_like(q[..., :1]), 0.5**0.5
    q, k = (torch.cat([ones, x, _products(x) * half], -1) for x in (q, k))
    found = divided(q, k, v, 1.0, 1e-6)[0] if use_norm else linear(q, k, v, None, 1.0)[0]
    compare("fla.ops.based.naive.naive_parallel_based", given, found.transpose(1, 2))
    return found.to(v.dtype)


def rebased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-5,
    use_scale: bool = True,
    use_normalize: bool = True,
) -> Tensor:
    """Stand in for ``parallel_rebased``."""
    q = _products(wide(q) * (q.shape[-1] ** -0.5 if use_scale else 1.0))
    k = _products(wide(k))
    output = divided(q, k, v, 1.0, eps)[0] if use_normalize else linear(q, k, v, None, 1.0)[0]
    return output.to(v.dtype)


def _products(x: Tensor) -> Tensor:
    return (x[..., :, None] * x[..., None, :]).flatten(-2)


FLA = ("fla",)
GATED = "linear attention on a state that decays, S_t = exp(g_t) S_{t-1} + k_t v_t^T"
KERNELS = (
    GpuKernel(FLA, ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"), gla, GATED),
    GpuKernel(
        FLA,
        (
            "chunk_simple_gla",
            "fused_chunk_simple_gla",
            "fused_recurrent_simple_gla",
            "parallel_simple_gla",
        ),
        simple_gla,
        GATED,
    ),
    GpuKernel(
        FLA,
        ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
        linear_attn,
        "linear attention, S_t = S_{t-1} + k_t v_t^T",
    ),
    GpuKernel(
        FLA,
        (
            "chunk_retention",
            "fused_chunk_retention",
            "fused_recurrent_retention",
            "parallel_retention",
        ),
        retention,
        f"retention, {GATED}",
    ),
    GpuKernel(
        FLA,
        ("chunk_lightning_attn", "fused_recurrent_lightning_attn"),
        lightning_attn,
        f"lightning attention, {GATED}",
    ),
    GpuKernel(
        FLA,
        ("chunk_hgrn", "fused_recurrent_hgrn"),
        hgrn,
        "a gated recurrence of each channel, h_t = exp(g_t) h_{t-1} + x_t",
    ),
    GpuKernel(
        FLA,
        ("parallel_based", "fused_chunk_based"),
        based,
        "linear attention by 1 + x + x^2 / 2 of x = q . k",
    ),
    GpuKernel(
        FLA,
        ("parallel_rebased",),
        rebased,
        "linear attention by (q . k)^2",
    ),
)
