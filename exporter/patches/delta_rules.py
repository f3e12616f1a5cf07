"""The gated delta rule of packages, by tokens, chunks or kernels -> ``LinearAttention``.

S_t = alpha_t S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = S_t q_t      per head
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linexport.models import functional
from linexport.patches.packages import Function


def _gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Stands in for functions of opengdn of (B, T, H, d), whose state is (B, H, d_v, d_k)."""
    heads = q.shape[2]
    output, last, _normalizer = functional.linear_attention(
        q.flatten(2),
        k.flatten(2),
        v.flatten(2),
        None if state is None else state.transpose(2, 3),
        decay=alpha.log(),
        beta=beta,
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
        scale=1.0,
    )
    return output.unflatten(2, (heads, -1)), last.transpose(2, 3)


FUNCTIONS = tuple(
    Function(f"opengdn.{module}", name, _gated_delta, "opengdn 0.1.0")
    for module, name in (
        ("reference", "gated_delta"),
        ("chunkwise", "gated_delta_chunkwise"),
        ("triton", "gated_delta_triton"),
    )
)
