"""Gated linear attention (Yang et al. 2023, arXiv 2312.06635): a decay per key channel.

S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(d_k)
g_t = logsigmoid(W_2 W_1 x_t + b) / 16
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    add_projections,
    expanded_width,
    gated_output,
    low_rank,
    projected,
    rms_norm,
)
from linexport.models.functional import linear_attention

RANK, NORMALIZER = 16, 16


@dataclass(frozen=True, kw_only=True)
class GLASettings(LayoutSettings):
    """LayoutSettings of ``gla``."""

    expand_k: float = 0.5
    expand_v: float = 1.0
    num_heads: int = 4
    num_kv_heads: int | None = None
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    elementwise_affine: bool = True
    clamp_min: float | None = None


class GatedLinearAttention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: GLASettings) -> None:
        super().__init__()
        self.settings, self.kv_heads = s, s.num_kv_heads or s.num_heads
        d_k = expanded_width(s.hidden_size * s.expand_k / s.num_heads, "key width")
        d_v = expanded_width(s.hidden_size * s.expand_v / s.num_heads, "value width")
        self.scale = d_k**-0.5
        keys, values = self.kv_heads * d_k, self.kv_heads * d_v
        add_projections(self, s, q=s.num_heads * d_k, k=keys, v=values)
        self.gk_proj = low_rank(s.hidden_size, RANK, keys, bias=True)
        norm = GatedRMSNorm(d_v, s.norm_eps, s.elementwise_affine)
        if s.use_output_gate:
            self.g_proj = nn.Linear(s.hidden_size, s.num_heads * d_v, bias=False)
        # The library fuses the norm with its gate under a name of its own.
        self.norm_name = "g_norm_swish_gate" if s.fuse_norm and s.use_output_gate else "g_norm"
        self.add_module(self.norm_name, norm)
        self.o_proj = nn.Linear(s.num_heads * d_v, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (projected(self, name, x) for name in "qkv")
        decay = F.logsigmoid(self.gk_proj(x)) / NORMALIZER
        if self.settings.clamp_min is not None:
            decay = decay.clamp(min=self.settings.clamp_min)
        o, _, _ = linear_attention(
            q,
            k,
            v,
            decay=decay,
            key_mask=context.keep,
            q_num_heads=self.settings.num_heads,
            kv_num_heads=self.kv_heads,
            update_rule="gated",
            scale=self.scale,
        )
        norm = getattr(self, self.norm_name)
        return gated_output(self, norm, o, x, self.settings.num_heads)


LAYOUT = WeightLayout(
    "gla",
    "GLAForCausalLM",
    GLASettings,
    lambda settings, index: GatedBlock(settings, GatedLinearAttention(settings)),
    rms_norm,
    {"hidden_act": ("swish",), "feature_map": (None,)},
)
