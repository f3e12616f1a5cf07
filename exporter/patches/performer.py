"""Causal attention of performer-pytorch, whose form without CUDA is a loop -> ``LinearAttention``.

o_t = q_t sum_{s <= t} k_s v_s / (q_t . (sum_{s <= t} k_s + eps))
"""

from __future__ import annotations

from torch import Tensor

from linexport.patches.heads_first import with_sum
from linexport.patches.packages import Function


def _attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 128, eps: float = 1e-6, **_: object
) -> Tensor:
    """Stands in for ``causal_linear_attention_noncuda`` of (B, H, T, d)."""
    numerator, denominator = with_sum(q, k, v)
    return numerator / (denominator + eps * q.sum(-1, keepdim=True))


FUNCTIONS = (
    Function(
        "performer_pytorch.performer_pytorch",
        "causal_linear_attention_noncuda",
        _attention,
        "performer-pytorch 1.1.4",
    ),
)
