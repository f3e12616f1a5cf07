"""DeltaNet (Yang et al. 2024, arXiv 2406.06484): what a key stood for is replaced.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = S_t^T q_t / sqrt(d_k)

q and k are activated, then normalised per head.
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
    l2_norm,
    projected,
    rms_norm,
)
from linexport.models.functional import linear_attention

ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "identity": lambda x: x,
}
SUM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaNetSettings(LayoutSettings):
    """LayoutSettings of ``delta_net``."""

    expand_k: float = 1.0
    expand_v: float = 1.0
    num_heads: int = 16
    use_beta: bool = True
    use_gate: bool = False
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False
    qk_norm: str = "l2"
    qk_activation: str = "silu"


class DeltaNet(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: DeltaNetSettings) -> None:
        super().__init__()
        self.settings = s
        keys = expanded_width(s.hidden_size * s.expand_k, "key width")
        values = expanded_width(s.hidden_size * s.expand_v, "value width")
        self.scale = (keys // s.num_heads) ** -0.5
        activation = "silu" if s.qk_activation == "silu" else "none"
        add_projections(self, s, activation, q=keys, k=keys)
        add_projections(self, s, v=values)
        if s.use_beta:
            self.b_proj = nn.Linear(s.hidden_size, s.num_heads, bias=False)
        if s.use_gate:
            self.g_proj = nn.Linear(s.hidden_size, values, bias=False)
        self.o_norm = GatedRMSNorm(values // s.num_heads, s.norm_eps)
        self.o_proj = nn.Linear(values, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.settings
        q, k, v = (projected(self, name, x) for name in "qkv")
        if not s.use_short_conv:
            v = F.silu(v)
        if not (s.use_short_conv and s.qk_activation == "silu"):
            q, k = (ACTIVATIONS[s.qk_activation](y) for y in (q, k))
        q, k = (self._normalise(y) for y in (q, k))
        beta = self.b_proj(x).sigmoid() if s.use_beta else x.new_ones(*x.shape[:2], s.num_heads)
        o, _, _ = linear_attention(
            q,
            k,
            v,
            beta=beta * 2 if s.allow_neg_eigval else beta,
            key_mask=context.keep,
            q_num_heads=s.num_heads,
            kv_num_heads=s.num_heads,
            update_rule="delta",
            scale=self.scale,
        )
        return gated_output(self, self.o_norm, o, x, s.num_heads)

    def _normalise(self, x: Tensor) -> Tensor:
        heads = self.settings.num_heads
        if self.settings.qk_norm == "l2":
            return l2_norm(x, heads)
        split = x.unflatten(-1, (heads, -1))
        return F.normalize(split, p=1, dim=-1, eps=SUM_EPSILON).flatten(-2)


LAYOUT = WeightLayout(
    "delta_net",
    "DeltaNetForCausalLM",
    DeltaNetSettings,
    lambda settings, index: GatedBlock(settings, DeltaNet(settings)),
    rms_norm,
    {
        "hidden_act": ("swish",),
        "qk_norm": ("l2", "sum"),
        "qk_activation": tuple(ACTIVATIONS),
    },
)
