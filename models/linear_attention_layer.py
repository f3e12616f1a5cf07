"""The kernel alone: a feature map and linear attention, without projections.

    output = linear_attention(phi(query), phi(key), value)      packed (B, T, heads * width)

What kernels and lowerings are measured with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linexport.models import feature_maps
from linexport.models.mapped_attention import check_map, mapped_attention
from linexport.models.unprojected_attention import UnprojectedAttention
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec


@dataclass(frozen=True, kw_only=True)
class LinearAttentionLayerConfig:
    """Fields of ``AttentionConfig``; the update rule is linear, which needs no gate."""

    num_heads: int
    head_dim: int
    kv_heads: int | None = None
    value_dim: int | None = None
    feature_map: str = "elu1"
    feature_map_options: dict[str, object] | None = None
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    scale: float = 1.0


class LinearAttentionLayer(UnprojectedAttention):
    """A layer without weights besides those a feature map may hold."""

    name = "linear_attention_layer"
    Config = LinearAttentionLayerConfig
    spec: LinearAttentionSpec

    def __init__(self, config: LinearAttentionLayerConfig) -> None:
        super().__init__(config)
        self.spec = LinearAttentionSpec(
            q_num_heads=config.num_heads,
            kv_num_heads=config.kv_heads or config.num_heads,
            causal=config.causal,
            normalize=config.normalize,
            scale=config.scale,
            eps=config.eps,
        )
        self.head_dim, self.value_dim = config.head_dim, config.value_dim or config.head_dim
        self.feature_map = feature_maps.make(
            config.feature_map, config.head_dim, config.feature_map_options
        )
        check_map(self.feature_map, self.spec)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, T, max(num_heads, kv_heads) * value_dim), of as many keys as queries."""
        torch._check(key.shape[1] == query.shape[1])
        output, _ = mapped_attention(self.feature_map, self.spec, query, key, value)
        return output
