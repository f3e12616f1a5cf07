"""HGRN (Qin et al. 2023, arXiv 2311.04823): a gated recurrence of each channel.

    h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) silu(W_i x_t),   o_t = norm(h_t) silu(W_g x_t)
    e^{g_t} = l + (1 - l) sigmoid(W_f x_t)

l (channels) is the lower bound of the layer, 0 in the first: sums of a softmax over the layers.
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
    add_projections,
    bounded_gate,
    expanded_width,
    projected,
    rms_norm,
)
from linexport.models.functional import linear_attention


@dataclass(frozen=True, kw_only=True)
class HGRNSettings(LayoutSettings):
    """LayoutSettings of ``hgrn``."""

    expand_ratio: float = 1
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True
    elementwise_affine: bool = True

    @property
    def width(self) -> int:
        """Channels of a layer."""
        return expanded_width(self.hidden_size * self.expand_ratio, "width of a layer")


class GatedRecurrence(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: HGRNSettings, index: int) -> None:
        super().__init__()
        self.index = index
        add_projections(self, s, "none", i=s.width, f=s.width)
        self.g_proj = nn.Linear(s.hidden_size, s.width, bias=False)
        self.g_norm = GatedRMSNorm(s.width, s.norm_eps, s.elementwise_affine)
        self.o_proj = nn.Linear(s.width, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        decay, rest = bounded_gate(projected(self, "f", x), context, self.index)
        value = F.silu(projected(self, "i", x)) * rest
        one = torch.ones_like(value[..., :1])
        h, _, _ = linear_attention(
            one,
            one,
            value,
            decay=decay,
            key_mask=context.keep,
            q_num_heads=1,
            kv_num_heads=value.shape[-1],
            update_rule="gated",
            scale=1.0,
        )
        y: Tensor = self.o_proj(self.g_norm(h, self.g_proj(x)))
        return y


LAYOUT = WeightLayout(
    "hgrn",
    "HGRNForCausalLM",
    HGRNSettings,
    lambda settings, index: GatedBlock(settings, GatedRecurrence(settings, index)),
    rms_norm,
    {"hidden_act": ("swish",)},
    lambda settings: settings.width if settings.use_lower_bound else None,
)
