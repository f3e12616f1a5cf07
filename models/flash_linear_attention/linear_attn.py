"""Linear attention with feature maps, as flash-linear-attention's ``linear_attn``.

    S_t = S_{t-1} + phi(k_t) v_t^T,   o_t = norm(S_t^T phi(q_t) / sqrt(d_k))

phi is one of ``MAPS`` for each head, or the product of two linear layers, of queries and keys each.
Features are divided by their sum where the configuration says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    expanded_width,
    repeated_heads,
    rms_norm,
)
from linexport.models.functional import linear_attention

PRODUCT = "elementwise_product"
MAPS = {"identity": lambda x: x, "relu": F.relu, "elu": lambda x: F.elu(x) + 1}
SUM_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class LinearAttnSettings(LayoutSettings):
    """LayoutSettings of ``linear_attn``."""

    expand_k: float = 1.0
    expand_v: float = 1.0
    num_heads: int = 4
    num_kv_heads: int | None = None
    feature_map: str = PRODUCT
    norm_q: bool = False
    norm_k: bool = False
    elementwise_affine: bool = True


class TwoLinearLayers(nn.Module):
    """(W_1 x + b_1)(W_2 x + b_2), of each head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer1(x) * self.layer2(x)
        return y


class LinearAttn(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: LinearAttnSettings) -> None:
        super().__init__()
        self.settings, self.kv_heads = s, s.num_kv_heads or s.num_heads
        self.d_k = expanded_width(s.hidden_size * s.expand_k / s.num_heads, "key width")
        d_v = expanded_width(s.hidden_size * s.expand_v / s.num_heads, "value width")
        self.q_proj = nn.Linear(s.hidden_size, s.num_heads * self.d_k, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, self.kv_heads * self.d_k, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, self.kv_heads * d_v, bias=False)
        if s.feature_map == PRODUCT:
            self.feature_map_q, self.feature_map_k = (
                TwoLinearLayers(self.d_k),
                TwoLinearLayers(self.d_k),
            )
        self.norm = GatedRMSNorm(d_v, s.norm_eps, s.elementwise_affine)
        self.o_proj = nn.Linear(s.num_heads * d_v, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.settings
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        k, v = (repeated_heads(y, self.kv_heads, s.num_heads) for y in (k, v))
        o, _, _ = linear_attention(
            self._features(q, "q", s.norm_q),
            self._features(k, "k", s.norm_k),
            v,
            key_mask=context.keep,
            q_num_heads=s.num_heads,
            kv_num_heads=s.num_heads,
            scale=self.d_k**-0.5,
        )
        y: Tensor = self.o_proj(self.norm(o.unflatten(-1, (s.num_heads, -1))).flatten(-2))
        return y

    def _features(self, x: Tensor, name: str, divided: bool) -> Tensor:
        kind = self.settings.feature_map
        of_head = getattr(self, f"feature_map_{name}") if kind == PRODUCT else MAPS[kind]
        y: Tensor = of_head(x.unflatten(-1, (-1, self.d_k)))
        if divided:
            y = y / (y.sum(-1, keepdim=True) + SUM_EPSILON)
        return y.flatten(-2)


LAYOUT = WeightLayout(
    "linear_attn",
    "LinearAttentionForCausalLM",
    LinearAttnSettings,
    lambda settings, index: GatedBlock(settings, LinearAttn(settings)),
    rms_norm,
    {
        "hidden_act": ("swish",),
        "feature_map": (PRODUCT, *MAPS),
        "tie_feature_map_qk": (False,),
        "norm_feature_map": (False,),
    },
)
