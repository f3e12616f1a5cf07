"""The gated delta rule of transformers -> ``linexport.LinearAttention``, update rule gated_delta.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = S_t^T q_t / sqrt(d_k)

q and k (B, T, H_k, d_k), divided by sqrt(|x|^2 + 1e-6) on request; v (B, T, H_v, d_v); beta
(B, T, H_v); g the same, or per key channel (B, T, H_v, d_k) in Kimi's variant. A query or key head
serves H_v / H_k value heads in a row, as in the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active

L2_EPSILON = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Stands in for the chunked form and for the recurrent one, which has no ``chunk_size``."""
    if use_qk_l2norm_in_kernel:
        query, key = l2norm(query), l2norm(key)
    return active().attend(
        query,
        key,
        value,
        decay=g.flatten(2),
        beta=beta,
        update_rule="gated_delta",
        scale=key.shape[-1] ** -0.5,
    )


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last axis.

    Written as a root mean square norm, for which runtimes have a kernel:
    1/sqrt(d) x / sqrt(|x|^2 / d + eps / d).
    """
    width = x.shape[-1]
    scale = torch.full((width,), width**-0.5, dtype=x.dtype)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + L2_EPSILON / width) * scale


PATCH = Patch(
    swaps=(
        Swap("torch_chunk_gated_delta_rule", gated_delta_rule),
        Swap("torch_recurrent_gated_delta_rule", gated_delta_rule),
        Swap("chunk_kimi_delta_attention", gated_delta_rule),
        Swap("recurrent_kimi_delta_attention", gated_delta_rule),
    ),
    families=(
        "bailing_hybrid",
        "kimi_linear",
        "lara_mini",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
    ),
)
