"""``torch.nn.MultiheadAttention`` by way of ``F.scaled_dot_product_attention``, always.

torch takes other ways: a fused operator, and explicit products where weights are requested, which
is the default. Weights of attention are then None: in linear form there are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Multihead(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with its parameters and their names, for inference only."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Output, and no weights; arguments as of the base."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (self._split(x) for x in self._projected(query, key, value))
        mask = None if is_causal and key_padding_mask is None else self._mask(attn_mask, q)
        if key_padding_mask is not None:
            hidden = _additive(key_padding_mask.reshape(-1, k.shape[2]), q)[:, None, None, :]
            mask = hidden if mask is None else mask + hidden
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal and mask is None
        )
        output = F.linear(
            found.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias
        )
        if not batched:
            return output[0], None
        return (output if self.batch_first else output.transpose(0, 1)), None

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """Additive, (T, S) or (B, heads, T, S)."""
        if mask is None:
            return None
        mask = _additive(mask, like)
        return mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """torch's boolean masks are True for what is hidden."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def refusal(module: nn.MultiheadAttention) -> str | None:
    """Why this one cannot be linear, if so."""
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key of its own (add_bias_kv or add_zero_attn)"
    return None


def swap(module: nn.Module) -> None:
    """Make every ``MultiheadAttention`` in ``module`` a ``Multihead``, in place."""
    for child in module.modules():
        if type(child) is nn.MultiheadAttention and refusal(child) is None:
            child.__class__ = Multihead
