"""Linear attention of tensors with the heads before the tokens, as most packages have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.models import functional


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None = None, **options: Any
) -> Tensor:
    """Return (B, H, T, d_v) of causal linear attention without a scale.

    Args:
        query: (B, H, T, d_k).
        key: (B, H, T, d_k).
        value: (B, H, T, d_v).
        decay: (B, H, T) or (B, H, T, d_k), in log space.
        options: other attributes of the op.
    """
    heads = value.shape[1]
    if decay is not None:
        decay = decay.reshape(*decay.shape[:3], -1).transpose(1, 2).flatten(2)
        options["update_rule"] = "gated"
    query, key, value = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
    options |= {"q_num_heads": heads, "kv_num_heads": heads, "scale": 1.0}
    output, _state, _normalizer = functional.linear_attention(
        query, key, value, decay=decay, **options
    )
    return output.unflatten(2, (heads, -1)).transpose(1, 2)


def with_sum(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (B, H, T, d_v), and (B, H, T, 1) of a value that is 1."""
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    found = linear_attention(query, key, value, decay)
    return found[..., :-1], found[..., -1:]
