"""Comba (Hu et al. 2025, arXiv 2506.02475): a delta rule that reads the state before it decays.

S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T,   o_t = S_t^T (q_t - D p_t) / sqrt(d_k)
p_t = sigmoid(c) k_t,   g_t = -e^A softplus(W_a x_t + b),   beta_t = sigmoid(W_b x_t)

q - D p, k and p are of norm 1 when they meet the state. The library's models have c and D whatever
``use_inner_decay`` and ``use_output_correction`` say.
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
    repeated_heads,
    rms_norm,
    scaled_heads,
)
from linexport.models.functional import generalized_delta_rule


@dataclass(frozen=True, kw_only=True)
class CombaSettings(LayoutSettings):
    """LayoutSettings of ``comba``."""

    num_hidden_layers: int = 21
    expand_v: float = 2.0
    head_dim: int = 256
    num_heads: int = 6
    num_v_heads: int | None = None
    use_output_gate: bool = True
    use_short_conv: bool = True
    conv_size: int = 4


class Comba(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: CombaSettings) -> None:
        super().__init__()
        self.settings, self.value_heads = s, s.num_v_heads or s.num_heads
        d_v = expanded_width(s.head_dim * s.expand_v, "value width")
        keys, values = s.num_heads * s.head_dim, self.value_heads * d_v
        add_projections(self, s, q=keys, k=keys, v=values)
        self.a_proj = nn.Linear(s.hidden_size, self.value_heads, bias=False)
        self.b_proj = nn.Linear(s.hidden_size, self.value_heads, bias=False)
        self.decay = nn.Parameter(torch.ones(s.num_heads))
        self.D = nn.Parameter(torch.ones(s.num_heads))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        if s.use_output_gate:
            self.g_proj = nn.Linear(s.hidden_size, values, bias=False)
        self.o_norm = GatedRMSNorm(d_v, s.norm_eps, gate="sigmoid")
        self.o_proj = nn.Linear(values, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s, heads = self.settings, self.value_heads
        q, k, v = (activated(self, name, x) for name in "qkv")
        p = scaled_heads(k, self.decay.sigmoid())
        q = q - scaled_heads(p, self.D)
        q, k, p = (repeated_heads(l2_norm(y, s.num_heads), s.num_heads, heads) for y in (q, k, p))
        beta = self.b_proj(x).sigmoid()
        steps = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        o, _ = generalized_delta_rule(
            q,
            k,
            scaled_heads(v, beta),
            steps.repeat_interleave(s.head_dim, -1),
            p,
            -scaled_heads(k, beta),
            key_mask=context.keep,
            num_heads=heads,
            scale=s.head_dim**-0.5,
        )
        return gated_output(self, self.o_norm, o, x, heads)


LAYOUT = WeightLayout(
    "comba",
    "CombaForCausalLM",
    CombaSettings,
    lambda settings, index: GatedBlock(settings, Comba(settings)),
    rms_norm,
    {"hidden_act": ("swish",)},
)
