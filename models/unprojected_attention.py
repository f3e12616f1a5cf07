"""Layers that are an attention alone: queries, keys and values come in, without projections."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import Dim

from linexport.models.registry import ReferenceModel
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.plugins.ops.window_attention import WindowSpec
from linexport.system.untyped import DynamicShapes


class UnprojectedAttention(ReferenceModel):
    """A layer of query, key and value, each (B, T, heads * width).

    Attributes:
        spec: numbers of heads, among others.
        head_dim: width of a query and key.
        value_dim: width of a value.
    """

    spec: LinearAttentionSpec | WindowSpec
    head_dim: int
    value_dim: int

    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        """Standard normal query, key and value."""
        generator = torch.Generator().manual_seed(seed)
        heads = self.spec.kv_num_heads
        widths = (
            self.spec.q_num_heads * self.head_dim,
            heads * self.head_dim,
            heads * self.value_dim,
        )
        return tuple(torch.randn(batch, length, width, generator=generator) for width in widths)

    def dynamic_shapes(self) -> DynamicShapes:
        """Batch and length of all three."""
        return ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 3
