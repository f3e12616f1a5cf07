"""Kimi Delta Attention (Kimi team 2025, arXiv 2510.26692): a delta rule with a decay per channel.

S_t = diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - (diag(e^{g_t}) S_{t-1})^T k_t)^T
o_t = S_t^T q_t / sqrt(d_k),   beta_t = sigmoid(W_b x_t)
g_t = -e^A softplus(f(x_t) + b), or lower_bound sigmoid(e^A (f(x_t) + b)), f of low rank
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    activated,
    add_projections,
    expanded_width,
    gated_output,
    l2_norm,
    low_rank,
    repeated_heads,
    rms_norm,
)
from linexport.models.functional import linear_attention


@dataclass(frozen=True, kw_only=True)
class KDASettings(LayoutSettings):
    """LayoutSettings of ``kda``."""

    expand_v: float = 1.0
    head_dim: int = 128
    num_heads: int = 16
    num_v_heads: int | None = None
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False
    lower_bound: float | None = None


class KimiDeltaAttention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: KDASettings) -> None:
        super().__init__()
        self.settings, self.value_heads = s, s.num_v_heads or s.num_heads
        d_v = expanded_width(s.head_dim * s.expand_v, "value width")
        keys, values = s.num_heads * s.head_dim, self.value_heads * d_v
        gates = self.value_heads * s.head_dim
        add_projections(self, s, q=keys, k=keys, v=values)
        self.f_proj = low_rank(s.hidden_size, d_v, gates)
        self.b_proj = nn.Linear(s.hidden_size, self.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(gates))
        self.g_proj = low_rank(s.hidden_size, d_v, values, bias=True)
        self.o_norm = GatedRMSNorm(d_v, s.norm_eps, gate="sigmoid")
        self.o_proj = nn.Linear(values, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s, heads = self.settings, self.value_heads
        q, k, v = (activated(self, name, x) for name in "qkv")
        q, k = (repeated_heads(l2_norm(y, s.num_heads), s.num_heads, heads) for y in (q, k))
        beta = self.b_proj(x).sigmoid()
        o, _, _ = linear_attention(
            q,
            k,
            v,
            decay=self._decay(x),
            beta=beta * 2 if s.allow_neg_eigval else beta,
            key_mask=context.keep,
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule="gated_delta",
            scale=s.head_dim**-0.5,
        )
        return gated_output(self, self.o_norm, o, x, heads)

    def _decay(self, x: Tensor) -> Tensor:
        """Return logarithms of decays, (B, T, heads * d_k)."""
        rate = self.A_log.exp().repeat_interleave(self.settings.head_dim)
        step = self.f_proj(x) + self.dt_bias
        if self.settings.lower_bound is None:
            return -rate * F.softplus(step)
        return self.settings.lower_bound * (rate * step).sigmoid()


LAYOUT = WeightLayout(
    "kda",
    "KDAForCausalLM",
    KDASettings,
    lambda settings, index: GatedBlock(settings, KimiDeltaAttention(settings)),
    rms_norm,
    {"hidden_act": ("swish",)},
)
