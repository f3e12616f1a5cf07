"""The kernel alone: near keys exactly, far ones by a feature map, without projections.

    output = near_and_far(query, key, value)      packed (B, T, heads * width)

What kernels and lowerings are measured with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linexport.models import feature_maps
from linexport.models.config import bounded
from linexport.models.unprojected_attention import UnprojectedAttention
from linexport.models.window_attention import check_windowed, near_and_far
from linexport.plugins.ops.window_attention import WindowSpec


@dataclass(frozen=True, kw_only=True)
class WindowAttentionLayerConfig:
    """Fields of ``WindowedConfig``."""

    num_heads: int
    head_dim: int
    kv_heads: int | None = None
    value_dim: int | None = None
    feature_map: str = "elu1"
    feature_map_options: dict[str, object] | None = None
    window: int = 64
    sinks: int = bounded(0, at_least=0)


class WindowAttentionLayer(UnprojectedAttention):
    """A layer whose only weights are the gain of the far part and those of a feature map."""

    name = "window_attention_layer"
    Config = WindowAttentionLayerConfig
    spec: WindowSpec

    def __init__(self, config: WindowAttentionLayerConfig) -> None:
        super().__init__(config)
        heads, width = config.num_heads, config.head_dim
        kv_heads = config.kv_heads or heads
        self.spec = WindowSpec(heads, kv_heads, config.window, config.sinks, width**-0.5)
        self.head_dim, self.value_dim = width, config.value_dim or width
        self.feature_map = feature_maps.make(config.feature_map, width, config.feature_map_options)
        check_windowed(self.feature_map, True)
        self.far_gain = nn.Parameter(torch.zeros(heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, T, num_heads * value_dim), of as many keys as queries."""
        torch._check(key.shape[1] == query.shape[1])
        parts, _ = near_and_far(self.feature_map, self.spec, query, key, value)
        return parts.joined(self.far_gain)
