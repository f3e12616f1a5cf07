"""LightNet (Qin et al. 2024, arXiv 2405.21022): each key channel divided by its sum over tokens.

S_t = sum_{s<=t} e^{k_s} v_s^T,   z_t = sum_{s<=t} e^{k_s},   o_t = S_t^T (q_t / z_t) / sqrt(d_k)

S and z are kept relative to the running maximum of k, so that neither overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    add_projections,
    low_rank,
    projected,
    rms_norm,
)
from linexport.models.functional import linear_attention, stabilized_exp

NORM_EPSILON = 1e-6
"""The library normalises the output with this, whatever ``norm_eps`` says."""


@dataclass(frozen=True, kw_only=True)
class LightNetSettings(LayoutSettings):
    """LayoutSettings of ``lightnet``."""

    num_heads: int | None = None
    expand_ratio: int | None = 128
    use_short_conv: bool = False
    conv_size: int = 4
    gate_low_rank_dim: int = 128
    elementwise_affine: bool = True

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads, and the key width of each."""
        if self.num_heads is None and self.expand_ratio is None:
            raise UsageError("The configuration has neither expand_ratio nor num_heads.")
        heads = self.num_heads or self.hidden_size // (self.expand_ratio or 1)
        if heads == 0 or self.hidden_size % heads:
            raise UsageError(
                f"The configuration gives {heads} heads for a width of {self.hidden_size}; "
                "expected a divisor of it."
            )
        return heads, self.expand_ratio or self.hidden_size // heads


class LightNetAttention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: LightNetSettings) -> None:
        super().__init__()
        self.heads, self.key_width = s.heads
        keys = self.heads * self.key_width
        add_projections(self, s, "none", q=keys, k=keys, v=s.hidden_size)
        self.g_proj = low_rank(s.hidden_size, s.gate_low_rank_dim, s.hidden_size)
        self.g_norm = GatedRMSNorm(s.hidden_size, NORM_EPSILON, s.elementwise_affine)
        self.o_proj = nn.Linear(s.hidden_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (projected(self, name, x) for name in "qkv")
        _, features, decay, _ = stabilized_exp(
            k, k, key_mask=context.keep, q_num_heads=self.heads, k_num_heads=self.heads
        )
        one = torch.ones_like(features[..., :1])
        rule: dict[str, Any] = {"decay": decay, "key_mask": context.keep, "update_rule": "gated"}
        z, _, _ = linear_attention(
            one, one, features, q_num_heads=1, kv_num_heads=k.shape[-1], scale=1.0, **rule
        )
        # At least 1 from the first token on; nothing but padding in front of it has less.
        o, _, _ = linear_attention(
            F.silu(q) / z.clamp(min=1.0),
            features,
            v,
            q_num_heads=self.heads,
            kv_num_heads=self.heads,
            scale=self.key_width**-0.5,
            **rule,
        )
        y: Tensor = self.o_proj(self.g_norm(o, self.g_proj(x)))
        return y


LAYOUT = WeightLayout(
    "lightnet",
    "LightNetForCausalLM",
    LightNetSettings,
    lambda settings, index: GatedBlock(settings, LightNetAttention(settings)),
    rms_norm,
    {"hidden_act": ("swish",)},
)
