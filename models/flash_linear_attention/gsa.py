"""Gated slot attention (Zhang et al. 2024, arXiv 2409.07146): a softmax over slots of memory.

K_t = K_{t-1} diag(e^{g_t}) + k_t s_t^T          keys of the slots, d_k x slots
V_t = diag(e^{g_t}) V_{t-1} + s_t v_t^T          their values, slots x d_v
o_t = V_t^T softmax(K_t^T q_t),   g_t = logsigmoid(W_f x_t) / n,   s_t = 1 - e^{g_t}

K decays by slot: each slot is a head with values of width 1, and the heads share q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    add_projections,
    expanded_width,
    projected,
    repeated_heads,
    rms_norm,
)
from linexport.models.functional import linear_attention

NORM_EPSILON = 1e-5
"""The library normalises the output with this, whatever ``norm_eps`` says."""


@dataclass(frozen=True, kw_only=True)
class GSASettings(LayoutSettings):
    """LayoutSettings of ``gsa``."""

    expand_k: float = 1.0
    expand_v: float = 1.0
    num_heads: int = 4
    num_kv_heads: int | None = None
    num_slots: int | None = 64
    use_short_conv: bool = False
    conv_size: int = 4
    feature_map: str = "swish"
    gate_logit_normalizer: int = 8
    elementwise_affine: bool = True


class GatedSlotAttention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: GSASettings) -> None:
        super().__init__()
        self.settings, self.kv_heads = s, s.num_kv_heads or s.num_heads
        d_k = expanded_width(s.hidden_size * s.expand_k / s.num_heads, "key width")
        d_v = expanded_width(s.hidden_size * s.expand_v / s.num_heads, "value width")
        self.slots = s.num_slots or d_k
        add_projections(self, s, q=s.num_heads * d_k, k=self.kv_heads * d_k, v=self.kv_heads * d_v)
        self.f_proj = nn.Linear(s.hidden_size, self.kv_heads * self.slots, bias=False)
        self.g_norm = GatedRMSNorm(s.num_heads * d_v, NORM_EPSILON, s.elementwise_affine)
        self.o_proj = nn.Linear(s.num_heads * d_v, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s, heads = self.settings, self.settings.num_heads
        q, k, v = (projected(self, name, x) for name in "qkv")
        q, k = (F.relu(y) if s.feature_map == "relu" else F.silu(y) for y in (q, k))
        decay = F.logsigmoid(self.f_proj(x)) / s.gate_logit_normalizer
        k, v, decay = (repeated_heads(y, self.kv_heads, heads) for y in (k, F.silu(v), decay))
        write = -decay.expm1()
        rule: dict[str, Any] = {"decay": decay, "key_mask": context.keep, "update_rule": "gated"}
        scores, _, _ = linear_attention(
            q, k, write, q_num_heads=heads, kv_num_heads=heads * self.slots, scale=1.0, **rule
        )
        shares = scores.unflatten(-1, (heads, -1)).softmax(-1).flatten(-2)
        o, _, _ = linear_attention(
            shares, write, v, q_num_heads=heads, kv_num_heads=heads, scale=1.0, **rule
        )
        y: Tensor = self.o_proj(self.g_norm(F.silu(o)))
        return y


LAYOUT = WeightLayout(
    "gsa",
    "GSAForCausalLM",
    GSASettings,
    lambda settings, index: GatedBlock(settings, GatedSlotAttention(settings)),
    rms_norm,
    {"hidden_act": ("swish",), "feature_map": ("swish", "relu")},
)
