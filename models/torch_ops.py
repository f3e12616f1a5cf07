"""The linexport ops as PyTorch operators: what a traced graph records.

``torch.ops.linexport.linear_attention``, ``causal_conv`` and ``feature_map`` compute what the
functions of ``linexport.models.functional`` and the feature maps compute. They exist to be traced
and exported; the functions are what to call and to train with. Importing this module registers
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linexport.models import functional
from linexport.models.feature_maps import base
from linexport.plugins.ops import causal_conv as conv_op
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec


@torch.library.custom_op("linexport::linear_attention", mutates_args=())
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None,
    past_normalizer: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str,
    causal: int,
    normalize: int,
    scale: float,
    eps: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``functional.linear_attention``."""
    spec = _spec(q_num_heads, kv_num_heads, update_rule, causal, normalize, scale, eps, chunk_size)
    outputs = functional.chunked_linear_attention(
        spec, query, key, value, past_state, past_normalizer, decay, beta, key_mask
    )
    output, state, normalizer = (x.contiguous() for x in outputs)
    return output, state, normalizer


@linear_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None,
    past_normalizer: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str,
    causal: int,
    normalize: int,
    scale: float,
    eps: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = _spec(q_num_heads, kv_num_heads, update_rule, causal, normalize, scale, eps, chunk_size)
    d_k, d_v = query.shape[-1] // q_num_heads, value.shape[-1] // kv_num_heads
    batch, length = query.shape[:2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(batch, length, spec.output_heads * d_v),
        query.new_empty(batch, kv_num_heads, d_k, d_v, dtype=dtype),
        query.new_empty(batch, kv_num_heads, d_k, dtype=dtype),
    )


def _spec(
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str,
    causal: int,
    normalize: int,
    scale: float,
    eps: float,
    chunk_size: int,
) -> LinearAttentionSpec:
    return LinearAttentionSpec(
        q_num_heads,
        kv_num_heads,
        update_rule,
        bool(causal),
        bool(normalize),
        scale,
        eps,
        chunk_size,
    )


@torch.library.custom_op("linexport::causal_conv", mutates_args=())
def causal_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """See ``functional.causal_conv``."""
    return functional.plain_causal_conv(input, weight, bias, past_state, activation)


@causal_conv.register_fake
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    batch, channels = input.shape[:2]
    optional = (None if x is None else x.shape for x in (bias, past_state))
    size = conv_op.check(activation, input.shape, weight.shape, *optional)
    return torch.empty_like(input), input.new_empty(batch, channels, size - 1)


@torch.library.custom_op("linexport::feature_map", mutates_args=())
def feature_map(x: Tensor, parameters: Sequence[Tensor], kind: str, num_heads: int) -> Tensor:
    """phi on every head of (B, T, num_heads * d)."""
    return base.apply_packed(kind, x, list(parameters), num_heads).clone()


@feature_map.register_fake
def _(x: Tensor, parameters: Sequence[Tensor], kind: str, num_heads: int) -> Tensor:
    return base.apply_packed(kind, x, list(parameters), num_heads)
