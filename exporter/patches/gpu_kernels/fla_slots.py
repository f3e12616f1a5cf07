"""Attention of fla to slots of memory, and keys that are normalised over earlier tokens.

    gsa   K_t = K_{t-1} diag(e^g_t) + k_t s_t^T,   V_t = diag(e^g_t) V_{t-1} + s_t v_t^T
          o_t = V_t^T softmax(scale K_t^T q_t)
    abc   the same, with what each slot takes divided by its sum over earlier tokens
    lightnet  linear attention whose key channels are divided so

q and k (B, T, H, K), v (B, T, H, V), s and g (B, T, H, M) of M slots. Dividing is by sums of
exp(s_t - m_t), m_t the largest s so far: z_t = log sum_{i <= t} exp(s_i), g_t = z_{t-1} - z_t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.patches.gpu_kernels import GpuKernel, compare
from linexport.patches.gpu_kernels.convolutions import shifted
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.recurrences import heads_of, linear, wide

Result = tuple[Tensor, Any]
"""Output, and the last states where the caller takes them."""


def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_gsa`` and its other form."""
    refuse_packed(cu_seqlens)
    heads, slots = q.shape[2], s.shape[3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = {"q": q, "k": k, "v": v, "s": s, "g": g, "scale": scale}
    dtype, inner = v.dtype, None
    if g is None:
        s, g, inner = normalised(s)
    q, k, v, s, g = (heads_of(wide(x), heads) for x in (q, k, v, s, g))
    first, second = (None, None) if initial_state is None else initial_state
    # Keys decay by slot: each slot is a head with values of width 1.
    first = None if first is None else first.mT.flatten(1, 2)[..., None]
    scores, first = linear(q, k, s.flatten(2)[..., None], g.flatten(2), scale, first)
    scores = scores.unflatten(2, (heads, slots))[..., 0]
    inner = None if inner is None else heads_of(inner, heads)
    scores = scores if inner is None else scores / inner
    shares = scores.softmax(-1)
    shares = shares if inner is None else shares / inner
    output, second = linear(shares, s, v, g, 1.0, second)
    compare("fla.ops.gsa.naive.naive_recurrent_gsa", given, output)
    first = first[..., 0].unflatten(1, (heads, slots)).mT
    return output.to(dtype), (first, second) if output_final_state else None


def abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    initial_state: tuple[Tensor, ...] | None = None,
    output_final_state: bool = False,
) -> Result:
    """Stand in for ``chunk_abc``."""
    refuse_packed(initial_state)
    output, last = gsa(q, k, v, s, output_final_state=output_final_state)
    return output, last


def lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_lightnet`` and its other form."""
    refuse_packed(cu_seqlens)
    refuse_packed(initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    new, g, inner = normalised(k)
    output, last = linear(wide(q) / inner, new, wide(v), g, scale)
    last = last.mT if state_v_first else last
    return output.to(v.dtype), (last if output_final_state else None, None)


def normalised(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(s_t - m_t), g_t = m_{t-1} - m_t and sums of them; m_t is the largest s so far."""
    s = wide(s)
    largest = s.cummax(1).values
    # Before the first token there is nothing to decay.
    g = shifted(largest.flatten(2)).unflatten(2, s.shape[2:]) - largest
    g = g.clamp(max=0.0)
    new = torch.exp(s - largest)
    one = torch.ones_like(new.flatten(2)[..., :1])[..., None]
    sums, _ = linear(one, one, new.flatten(2)[..., None], g.flatten(2), 1.0)
    return new, g, sums[..., 0].unflatten(2, s.shape[2:])


FLA = ("fla",)
KERNELS = (
    GpuKernel(
        FLA,
        ("chunk_gsa", "fused_recurrent_gsa"),
        gsa,
        "attention to slots of memory that decay, o_t = V_t^T softmax(K_t^T q_t)",
    ),
    GpuKernel(
        FLA,
        ("chunk_abc",),
        abc,
        "attention to slots of memory, each a softmax over earlier tokens",
    ),
    GpuKernel(
        FLA,
        ("chunk_lightnet", "fused_recurrent_lightnet"),
        lightnet,
        "linear attention with keys that are a softmax over earlier tokens",
    ),
)
