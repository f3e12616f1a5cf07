"""Gated DeltaNet-2 (Hatamizadeh et al. 2026, arXiv 2605.22791): erased and written by channel.

S_t = (I - k_t (b_t * k_t)^T) diag(e^{g_t}) S_{t-1} + k_t (w_t * v_t)^T
o_t = S_t^T q_t / sqrt(d_k),   g_t = -e^A softplus(f(x_t) + c), f of low rank
b_t = sigmoid(W_b x_t) per key channel,   w_t = sigmoid(W_w x_t) per value channel

The library has this layer, and no model of it up to its version 0.6.0: the stack around it is the
one that its other models have, and settings have the names of the layer's arguments.
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
from linexport.models.functional import generalized_delta_rule


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet2Settings(LayoutSettings):
    """LayoutSettings of ``gdn2``."""

    expand_v: float = 1.0
    head_dim: int = 128
    num_heads: int = 16
    num_v_heads: int | None = None
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False


class GatedDeltaNet2(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: GatedDeltaNet2Settings) -> None:
        super().__init__()
        self.settings, self.value_heads = s, s.num_v_heads or s.num_heads
        d_v = expanded_width(s.head_dim * s.expand_v, "value width")
        keys, values = s.num_heads * s.head_dim, self.value_heads * d_v
        add_projections(self, s, q=keys, k=keys, v=values)
        self.f_proj = low_rank(s.hidden_size, d_v, keys)
        self.b_proj = nn.Linear(s.hidden_size, keys, bias=False)
        self.w_proj = nn.Linear(s.hidden_size, values, bias=False)
        self.A_log = nn.Parameter(torch.zeros(s.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(keys))
        self.g_proj = low_rank(s.hidden_size, d_v, values, bias=True)
        self.o_norm = GatedRMSNorm(d_v, s.norm_eps, gate="sigmoid")
        self.o_proj = nn.Linear(values, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s, heads = self.settings, self.value_heads
        q, k, v = (activated(self, name, x) for name in "qkv")
        q, k = (l2_norm(y, s.num_heads) for y in (q, k))
        erase = self.b_proj(x).sigmoid()
        rate = self.A_log.exp().repeat_interleave(s.head_dim)
        decay = -rate * F.softplus(self.f_proj(x) + self.dt_bias)
        # The operator reads the state before it decays.
        read = decay.exp() * (erase * 2 if s.allow_neg_eigval else erase) * k
        q, k, decay, read = (repeated_heads(y, s.num_heads, heads) for y in (q, k, decay, read))
        o, _ = generalized_delta_rule(
            q,
            k,
            v * self.w_proj(x).sigmoid(),
            decay,
            read,
            -k,
            key_mask=context.keep,
            num_heads=heads,
            scale=s.head_dim**-0.5,
        )
        return gated_output(self, self.o_norm, o, x, heads)


LAYOUT = WeightLayout(
    "gdn2",
    "GatedDeltaNet2ForCausalLM",
    GatedDeltaNet2Settings,
    lambda settings, index: GatedBlock(settings, GatedDeltaNet2(settings)),
    rms_norm,
    {"hidden_act": ("swish",), "conv_bias": (False,)},
)
