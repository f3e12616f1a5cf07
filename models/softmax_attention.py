"""Multi-head softmax attention as a layer: what linear attention is held against, or made from.

    q = W_q x   k = W_k x   v = W_v x                 x (B, T, dim)
    output      W_o softmax(q k^T / sqrt(d)) v        (B, T, dim)

Its projections have the names and shapes of those of ``LinearAttention``. Its state is every key
and value so far: it grows by one row a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.attention import AttentionConfig


class KeysAndValues(NamedTuple):
    """All rows so far, (B, T, kv_heads * d) and (B, T, kv_heads * d_v)."""

    key: Tensor
    value: Tensor


class SoftmaxAttention(nn.Module):
    """The layer above; ``causal=False`` lets every token see the whole sequence.

    Raises:
        UsageError: fields of config that only linear attention has, or sizes that do not divide.
    """

    def __init__(self, config: AttentionConfig, causal: bool = True) -> None:
        super().__init__()
        heads, kv_heads = config.num_heads, config.kv_heads or config.num_heads
        if config.update_rule != "linear" or config.scale != 1.0 or heads % kv_heads:
            raise UsageError(
                f"Softmax attention with update_rule {config.update_rule!r}, scale {config.scale} "
                f"and {kv_heads} key/value heads for {heads}; expected 'linear', 1.0 and a divisor."
            )
        self.head_dim = config.width_per_head()
        self.value_dim = config.value_dim or self.head_dim
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        self.query = nn.Linear(config.dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_heads * self.value_dim, bias=False)
        self.output = nn.Linear(heads * self.value_dim, config.dim, bias=False)

    def initial_state(self, batch: int) -> KeysAndValues:
        """No rows."""
        key, value = self.key.weight, self.value.weight
        return KeysAndValues(
            key.new_zeros(batch, 0, key.shape[0]), value.new_zeros(batch, 0, value.shape[0])
        )

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, state: KeysAndValues | None = None
    ) -> tuple[Tensor, KeysAndValues]:
        """Output (B, T, dim) and the state after the last token; arguments as of LinearAttention.

        ``key_mask`` is of the tokens of x alone, and cannot be given with a state.

        Raises:
            UsageError: a mask and a state are given.
        """
        if state is not None and key_mask is not None:
            raise UsageError("Softmax attention takes a key_mask or a state, not both.")
        key, value = self.key(x), self.value(x)
        if state is not None:
            key, value = torch.cat([state.key, key], 1), torch.cat([state.value, value], 1)
        output = F.scaled_dot_product_attention(
            _split(self.query(x), self.heads),
            _split(key, self.kv_heads),
            _split(value, self.kv_heads),
            self._mask(x, key, key_mask, state),
            is_causal=self.causal and key_mask is None and state is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.output(output.transpose(1, 2).flatten(2)), KeysAndValues(key, value)

    def _mask(
        self, x: Tensor, key: Tensor, key_mask: Tensor | None, state: KeysAndValues | None
    ) -> Tensor | None:
        """Boolean mask of visible keys, where ``is_causal`` alone does not say it."""
        seen = None if key_mask is None else key_mask[:, None, None, :]
        if not self.causal or (key_mask is None and state is None):
            return seen
        total, length = key.shape[1], x.shape[1]
        earlier = torch.ones(length, total, dtype=torch.bool, device=x.device)
        earlier = earlier.tril(total - length)
        return earlier if seen is None else earlier & seen


def _split(packed: Tensor, heads: int) -> Tensor:
    """(B, T, heads * width) as (B, heads, T, width)."""
    return packed.unflatten(-1, (heads, -1)).transpose(1, 2)
