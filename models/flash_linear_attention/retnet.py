"""Retention (Sun et al. 2023, arXiv 2307.08621): a constant decay per head, on rotated keys.

    S_t = gamma_h S_{t-1} + R_t k_t v_t^T,   o_t = S_t^T R_t q_t / sqrt(d_k)
    gamma_h = 1 - 2^(-5-h)

R_t turns the pair of channels (i, i + d_k/2) by t 10000^(-2 i / d_k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    expanded_width,
    gated_output,
    rms_norm,
)
from linexport.models.functional import linear_attention

BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class RetNetSettings(LayoutSettings):
    """LayoutSettings of ``retnet``."""

    expand_k: float = 1.0
    expand_v: float = 2.0
    hidden_ratio: float | None = 2
    num_heads: int = 8
    num_kv_heads: int | None = None
    use_output_gate: bool = True
    elementwise_affine: bool = True


class Retention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    log_gamma: Tensor
    frequencies: Tensor

    def __init__(self, s: RetNetSettings) -> None:
        super().__init__()
        self.settings, self.kv_heads = s, s.num_kv_heads or s.num_heads
        self.d_k = expanded_width(s.hidden_size * s.expand_k / s.num_heads, "key width")
        d_v = expanded_width(s.hidden_size * s.expand_v / s.num_heads, "value width")
        self.q_proj = nn.Linear(s.hidden_size, s.num_heads * self.d_k, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, self.kv_heads * self.d_k, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, self.kv_heads * d_v, bias=False)
        if s.use_output_gate:
            self.g_proj = nn.Linear(s.hidden_size, s.num_heads * d_v, bias=False)
        self.norm_name = "g_norm_swish_gate" if s.fuse_norm and s.use_output_gate else "g_norm"
        self.add_module(self.norm_name, GatedRMSNorm(d_v, s.norm_eps, s.elementwise_affine))
        self.o_proj = nn.Linear(s.num_heads * d_v, s.hidden_size, bias=False)
        heads = torch.arange(s.num_heads, dtype=torch.float64)
        log_gamma = torch.log1p(-torch.exp2(-5.0 - heads)).float()
        pairs = torch.arange(0, self.d_k, 2, dtype=torch.float32) / self.d_k
        self.register_buffer("log_gamma", log_gamma, persistent=False)
        self.register_buffer("frequencies", BASE**-pairs, persistent=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        angles = (context.positions() * self.frequencies)[:, :, None]
        q, k = (_rotate(y.unflatten(-1, (-1, self.d_k)), angles) for y in (q, k))
        groups = self.settings.num_heads // self.kv_heads
        o, _, _ = linear_attention(
            q.flatten(2),
            k.repeat_interleave(groups, dim=2).flatten(2),
            v.unflatten(-1, (self.kv_heads, -1)).repeat_interleave(groups, dim=2).flatten(2),
            decay=self.log_gamma.expand(*x.shape[:2], -1),
            key_mask=context.keep,
            q_num_heads=self.settings.num_heads,
            kv_num_heads=self.settings.num_heads,
            update_rule="gated",
            scale=self.d_k**-0.5,
        )
        norm = getattr(self, self.norm_name)
        return gated_output(self, norm, o, x, self.settings.num_heads)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x (B, T, H, d), angles (B, T, 1, d/2)."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


LAYOUT = WeightLayout(
    "retnet",
    "RetNetForCausalLM",
    RetNetSettings,
    lambda settings, index: GatedBlock(settings, Retention(settings)),
    rms_norm,
    {"hidden_act": ("swish",), "feature_map": (None,)},
)
