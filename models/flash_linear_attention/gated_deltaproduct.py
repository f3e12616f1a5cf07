"""DeltaProduct (Siems et al. 2025, arXiv 2502.10297): n delta rules for each token.

S_{t,0} = e^{g_t} S_{t-1,n},   o_t = S_{t,n}^T q_t / sqrt(d_k)
S_{t,i} = S_{t,i-1} + beta_{t,i} k_{t,i} (v_{t,i} - S_{t,i-1}^T k_{t,i})^T

computed as a sequence of n T tokens, of which the first of each n decays and the last is read.
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
class GatedDeltaProductSettings(LayoutSettings):
    """LayoutSettings of ``gated_deltaproduct``."""

    num_hidden_layers: int = 21
    expand_v: float = 2.0
    head_dim: int = 256
    num_heads: int = 6
    use_output_gate: bool = True
    use_short_conv: bool = True
    conv_size: int = 4
    use_forget_gate: bool = False
    allow_neg_eigval: bool = False
    num_householder: int = 1


class GatedDeltaProduct(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: GatedDeltaProductSettings) -> None:
        super().__init__()
        self.settings, n = s, s.num_householder
        d_v = expanded_width(s.head_dim * s.expand_v, "value width")
        keys, values = s.num_heads * s.head_dim, s.num_heads * d_v
        add_projections(self, s, q=keys, k=keys * n, v=values * n)
        self.b_proj = nn.Linear(s.hidden_size, s.num_heads * n, bias=False)
        if s.use_forget_gate:
            self.a_proj = nn.Linear(s.hidden_size, s.num_heads, bias=False)
            self.A_log = nn.Parameter(torch.zeros(s.num_heads))
            self.dt_bias = nn.Parameter(torch.zeros(s.num_heads))
        if s.use_output_gate:
            self.g_proj = nn.Linear(s.hidden_size, values, bias=False)
        self.o_norm = GatedRMSNorm(d_v, s.norm_eps)
        self.o_proj = nn.Linear(values, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.settings
        q, k, v = (activated(self, name, x) for name in "qkv")
        beta = self.b_proj(x).sigmoid()
        options = {"decay": self._decay(x)} if s.use_forget_gate else {}
        o, _, _ = linear_attention(
            self._each(l2_norm(q, s.num_heads)),
            l2_norm(self._apart(k), s.num_heads),
            self._apart(v),
            beta=self._apart(beta * 2 if s.allow_neg_eigval else beta),
            key_mask=context.keep.repeat_interleave(s.num_householder, 1),
            q_num_heads=s.num_heads,
            kv_num_heads=s.num_heads,
            update_rule="gated_delta" if s.use_forget_gate else "delta",
            scale=s.head_dim**-0.5,
            **options,
        )
        last = o.unflatten(1, (-1, s.num_householder))[:, :, -1]
        return gated_output(self, self.o_norm, last, x, s.num_heads)

    def _decay(self, x: Tensor) -> Tensor:
        """Return logarithms of decays, (B, n T, heads): 0 but for the first of each n."""
        steps = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        return self._apart(F.pad(steps, (0, (self.settings.num_householder - 1) * steps.shape[2])))

    def _apart(self, x: Tensor) -> Tensor:
        """Return (B, n T, C) of (B, T, n C)."""
        return x.unflatten(2, (self.settings.num_householder, -1)).flatten(1, 2)

    def _each(self, x: Tensor) -> Tensor:
        """Return (B, n T, C) of (B, T, C), each token n times."""
        return x.repeat_interleave(self.settings.num_householder, 1)


LAYOUT = WeightLayout(
    "gated_deltaproduct",
    "GatedDeltaProductForCausalLM",
    GatedDeltaProductSettings,
    lambda settings, index: GatedBlock(settings, GatedDeltaProduct(settings)),
    rms_norm,
    {"hidden_act": ("swish",)},
)
