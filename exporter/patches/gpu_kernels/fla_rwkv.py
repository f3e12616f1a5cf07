"""Kernels of RWKV in fla, and the generalised delta rule.

    RWKV-6  o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t,   S_t = diag(e^w_t) S_{t-1} + k_t v_t^T
    RWKV-7  S_t = diag(e^w_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = scale S_t^T r_t

r, w, k, a and b (B, T, H, K), v (B, T, H, V), u (H, K).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.patches.gpu_kernels import GpuKernel, compare, is_traced
from linexport.patches.gpu_kernels.convolutions import shifted
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.recurrences import generalized, linear, wide

Result = tuple[Tensor, Any]
"""Output, and the last state where the caller takes it."""


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_rwkv6`` and its other form."""
    refuse_packed(cu_seqlens)
    refuse_packed(initial_state)
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    dtype = v.dtype
    r, k, v, w, u = map(wide, (r, k, v, w, u))
    newest = (r * u * k).sum(-1, keepdim=True) * v * scale
    if is_traced():  # the state without the newest token is that of inputs one token late
        late = (shifted(x.flatten(2)).unflatten(2, x.shape[2:]) for x in (k, v, w))
        key, value, decay = late
        before, last = linear(r, key, value, decay, scale)
        return (before + newest).to(dtype), last if output_final_state else None
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, r[:, t]) * scale)
        S = S * w[:, t].exp()[..., None] + k[:, t][..., None] * v[:, t][..., None, :]
    output = torch.stack(outputs, 1) + newest
    given = {n: x.transpose(1, 2) for n, x in (("q", r), ("k", k), ("v", v), ("w", w))}
    name = "fla.ops.rwkv6.recurrent_naive.naive_recurrent_rwkv6"
    compare(name, {**given, "u": u, "scale": scale}, output.transpose(1, 2))
    return output.to(dtype), S if output_final_state else None


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> Result:
    """Stand in for ``chunk_rwkv7`` and its other form; w is said to be above ``lower_bound``."""
    refuse_packed(cu_seqlens)
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    output, last = generalized(r, w, k, v, a, b, scale, initial_state)
    if scale == r.shape[-1] ** -0.5:
        rows = (("q", r), ("k", k), ("v", v), ("alpha", a), ("beta", b), ("gk", w))
        given = {name: x.transpose(1, 2) for name, x in rows}
        compare(f"{DPLR}.naive.dplr_recurrence", given, output.transpose(1, 2))
    return output, last if output_final_state else None


def fused_mul_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``fused_mul_recurrent_rwkv7``, which multiplies a by keys itself."""
    return rwkv7(r, w, k, v, -kk, kk * a, scale, initial_state, output_final_state, cu_seqlens)


def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> Result:
    """Stand in for ``chunk_dplr_delta_rule`` and its other form."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return rwkv7(q, gk, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


def addcmul(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Stand in for ``fused_addcmul_rwkv7``."""
    mixes = (xr, xw, xk, xv, xa, xg)
    return tuple(None if x is None else hidden_states + delta * x for x in mixes)


def k_update(k: Tensor, a: Tensor, ka: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Stand in for ``fused_k_rwkv7``."""
    refuse_packed(cu_seqlens)
    return k + k * (a - 1) * ka


def gate_output_correction(
    o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor
) -> Tensor:
    """Stand in for the function of that name: the newest token counts once more."""
    newest = (r * k * r_k).sum(-1, keepdim=True) * v
    return (o + newest.flatten(-2)) * g


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
) -> Any:
    """Stand in for ``token_shift``: x_{t-1} - x_t."""
    refuse_packed(cu_seqlens)
    past = None if cache is None else cache.reshape(x.shape[0], x.shape[-1], 1)
    found = shifted(x, past) - x
    return (found, x[:, -1:]) if output_cache else found


FLA = ("fla",)
DPLR = "fla.ops.generalized_delta_rule.dplr"
SEVEN = "the generalised delta rule, S_t = exp(w_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T"
KERNELS = (
    GpuKernel(
        FLA,
        ("chunk_rwkv6", "fused_recurrent_rwkv6"),
        rwkv6,
        "RWKV-6, linear attention whose newest token has a weight of its own",
    ),
    GpuKernel(FLA, ("chunk_rwkv7", "fused_recurrent_rwkv7"), rwkv7, SEVEN),
    GpuKernel(FLA, ("fused_mul_recurrent_rwkv7",), fused_mul_rwkv7, SEVEN),
    GpuKernel(FLA, ("chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"), dplr, SEVEN),
    GpuKernel(
        FLA,
        ("fused_addcmul_rwkv7",),
        addcmul,
        "mixes of a token and the one before",
        "ops.rwkv7.fused_addcmul.torch_addcmul_rwkv7",
    ),
    GpuKernel(
        FLA,
        ("fused_k_rwkv7",),
        k_update,
        "k + k (a - 1) ka",
        "ops.rwkv7.fused_k_update.k_update_ref",
    ),
    GpuKernel(
        FLA,
        ("gate_output_correction",),
        gate_output_correction,
        "(o + (r . k u) v) g",
        "ops.rwkv7.gate_output_correction.gate_output_correction_ref",
    ),
    GpuKernel(
        FLA,
        ("token_shift",),
        token_shift,
        "x_{t-1} - x_t",
        "modules.token_shift.token_shift_ref",
    ),
)
