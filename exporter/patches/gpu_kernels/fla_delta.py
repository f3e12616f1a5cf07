"""Delta rules of fla: ``fla.ops`` delta_rule, gated_delta_rule, kda, comba, gdn2, their products.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T,   o_t = scale S_t^T q_t

q and k (B, T, H, K), v (B, T, HV, V), g (B, T, HV) or (B, T, HV, K), beta (B, T, HV). Kernels may
make g, beta and the norms of q and k themselves, from parameters that they are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches.gated_delta import l2norm
from linexport.patches.gpu_kernels import GpuKernel, compare
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.recurrences import delta, generalized, heads_of, wide

NAIVE = {
    "delta_rule": "fla.ops.delta_rule.naive.delta_rule_recurrence",
    "gated_delta_rule": "fla.ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule",
    "kda": "fla.ops.kda.naive.naive_recurrent_kda",
}
"""References of the library, without decays, and with those of heads and of channels."""

Result = tuple[Tensor, Any]
"""Output, and the last state where the caller takes it."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_delta_rule`` and its other forms."""
    return gated_delta_rule(
        q,
        k,
        v,
        None,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
    gk: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_gated_delta_rule``, ``chunk_kda`` and their other forms."""
    refuse_packed(cu_seqlens)
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if use_gate_in_kernel and g is not None:
        g = gate(g, A_log, dt_bias, lower_bound)
    g = g if gk is None else gk if g is None else gk + g[..., None]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    first = state_v_first or transpose_state_layout
    state = (
        initial_state.transpose(-1, -2) if first and initial_state is not None else initial_state
    )
    output, last = delta(q, k, v, beta, g, scale, state)
    if g is None and scale == q.shape[-1] ** -0.5:
        given = {n: x.transpose(1, 2) for n, x in (("q", q), ("k", k), ("v", v), ("beta", beta))}
        compare(NAIVE["delta_rule"], given, output.transpose(1, 2))
    elif g is not None and q.shape[2] == v.shape[2]:
        library = NAIVE["kda" if g.dim() == 4 else "gated_delta_rule"]
        compare(library, {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale}, output)
    last = last.transpose(-1, -2) if first else last
    return output, last if output_final_state else None


def gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Return the logarithm of decays (B, T, H) or (B, T, H, K) of what a projection gives.

    -exp(A) softplus(g + bias), or  bound sigmoid(exp(A) (g + bias))  where there is a bound.
    """
    g = g.float()
    heads = g.shape[2:3] if g.dim() == 3 else (g.shape[2], 1)
    if dt_bias is not None:
        g = g + dt_bias.float().view(g.shape[2:])
    rate = None if A_log is None else A_log.float().exp().view(heads)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(g if rate is None else rate * g)
    assert rate is not None  # the kernel takes none without a bound
    return -rate * F.softplus(g)


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_comba`` and its other form, which erases at another key p."""
    refuse_packed(cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k, p = l2norm(q), l2norm(k), l2norm(p)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    beta = torch.ones_like(g) if beta is None else beta
    q, k, p = (heads_of(wide(x), v.shape[2]) for x in (q, k, p))
    decay, rate = wide(g)[..., None].expand_as(k), wide(beta)[..., None]
    value = wide(v) * rate
    output, last = generalized(q, decay, k, value, p, -rate * decay.exp() * k, scale, initial_state)
    given = {"q": q, "k": k, "v": v, "p": p, "beta": beta, "g": g, "scale": scale}
    compare("fla.ops.comba.naive.naive_recurrent_comba", given, output)
    return output.to(v.dtype), last if output_final_state else None


def gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_gdn2`` and its other form, which erases and writes by channel."""
    refuse_packed(cu_seqlens)
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    g = gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else wide(g)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, b = (heads_of(wide(x), v.shape[2]) for x in (q, k, b))
    state = initial_state
    state = state.mT if state_v_first and state is not None else state
    output, last = generalized(q, g, k, wide(v) * w, wide(b) * k * g.exp(), -k, scale, state)
    given = {"q": q, "k": k, "v": v, "g": g, "b": b, "w": w, "scale": scale}
    compare("fla.ops.gdn2.naive.naive_recurrent_gdn2", given, output)
    last = last.mT if state_v_first else last
    return output.to(v.dtype), last if output_final_state else None


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Stand in for ``chunk_gated_delta_product``: several writes to the state for each token.

    k, v and beta have num_householder rows for each token; the state decays before the first.
    """
    refuse_packed(cu_seqlens)
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = q.repeat_interleave(num_householder, 1)
    decay = None
    if g is not None:
        none = torch.zeros_like(g)
        decay = torch.stack([g, *[none] * (num_householder - 1)], 2).flatten(1, 2)
    output, last = delta(rows, k, v, beta, decay, scale, initial_state)
    output = output.unflatten(1, (-1, num_householder))[:, :, -1]
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale}
    name = "fla.ops.gated_delta_product.naive.naive_recurrent_gated_delta_product"
    compare(name, given | {"num_householder": num_householder}, output)
    return output, last if output_final_state else None


KERNELS = (
    GpuKernel(
        ("fla",),
        (
            "chunk_delta_rule",
            "fused_chunk_delta_rule",
            "fused_recurrent_delta_rule",
            "parallel_delta_rule",
        ),
        delta_rule,
        "the delta rule S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T",
    ),
    GpuKernel(
        ("fla",),
        (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            "chunk_kda",
            "fused_recurrent_kda",
        ),
        gated_delta_rule,
        "the delta rule on a state that decays, S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t "
        "S_{t-1}^T k_t)^T",
    ),
    GpuKernel(
        ("fla",),
        ("fused_kda_gate",),
        gate,
        "the logarithm of decays, -exp(A) softplus(g + bias)",
        "ops.kda.gate.naive_kda_gate",
    ),
    GpuKernel(
        ("fla",),
        ("chunk_comba", "fused_recurrent_comba"),
        comba,
        "the delta rule with another key to erase at, S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t "
        "S_{t-1}^T p_t)^T",
    ),
    GpuKernel(
        ("fla",),
        ("chunk_gdn2", "fused_recurrent_gdn2"),
        gdn2,
        "the delta rule with gates of each channel, S_t = a_t S_{t-1} + k_t (w_t v_t - (a_t "
        "S_{t-1})^T (b_t k_t))^T",
    ),
    GpuKernel(
        ("fla",),
        ("chunk_gated_delta_product",),
        gated_delta_product,
        "several steps of the delta rule for each token",
    ),
)
