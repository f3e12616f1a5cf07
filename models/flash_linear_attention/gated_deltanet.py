"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): the delta rule on a state that decays.

S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,   o_t = S_t^T q_t / sqrt(d_k)
g_t = -e^A softplus(W_a x_t + b),   beta_t = sigmoid(W_b x_t)
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
    rms_norm,
)
from linexport.models.functional import linear_attention


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSettings(LayoutSettings):
    """LayoutSettings of ``gated_deltanet``."""

    num_hidden_layers: int = 21
    expand_v: float = 2.0
    head_dim: int = 256
    num_heads: int = 6
    num_v_heads: int | None = None
    use_gate: bool = True
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False
    output_gate_activation: str = "swish"


class GatedDeltaNet(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: GatedDeltaNetSettings) -> None:
        super().__init__()
        self.settings, self.value_heads = s, s.num_v_heads or s.num_heads
        d_v = expanded_width(s.head_dim * s.expand_v, "value width")
        keys, values = s.num_heads * s.head_dim, self.value_heads * d_v
        add_projections(self, s, q=keys, k=keys, v=values)
        self.a_proj = nn.Linear(s.hidden_size, self.value_heads, bias=False)
        self.b_proj = nn.Linear(s.hidden_size, self.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        if s.use_gate:
            self.g_proj = nn.Linear(s.hidden_size, values, bias=False)
        self.o_norm = GatedRMSNorm(d_v, s.norm_eps, gate=s.output_gate_activation)
        self.o_proj = nn.Linear(values, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.settings
        q, k, v = (activated(self, name, x) for name in "qkv")
        beta = self.b_proj(x).sigmoid()
        o, _, _ = linear_attention(
            l2_norm(q, s.num_heads),
            l2_norm(k, s.num_heads),
            v,
            decay=-self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias),
            beta=beta * 2 if s.allow_neg_eigval else beta,
            key_mask=context.keep,
            q_num_heads=s.num_heads,
            kv_num_heads=self.value_heads,
            update_rule="gated_delta",
            scale=s.head_dim**-0.5,
        )
        return gated_output(self, self.o_norm, o, x, self.value_heads)


LAYOUT = WeightLayout(
    "gated_deltanet",
    "GatedDeltaNetForCausalLM",
    GatedDeltaNetSettings,
    lambda settings, index: GatedBlock(settings, GatedDeltaNet(settings)),
    rms_norm,
    {"hidden_act": ("swish",), "output_gate_activation": ("swish", "silu", "sigmoid")},
)
