"""Feature map and linear attention together, and the state they carry.

    output = linear_attention(phi_q(query), phi_k(key), value)

A normalised layer with an exponential map takes the logarithms of the features, stabilises them
(``StabilizedExp``) and runs the gated rule on the result, in float32: the same ratio
at any scale of the inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models import functional
from linexport.models.feature_maps import FeatureMap
from linexport.models.functional import stabilized_exp
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.plugins.ops.stabilized_exp import LOWEST

# Smallest |k| divided by; not torch's 1e-12, which float16 rounds to 0.
_KEY_NORM = 1e-6


class AttentionState(NamedTuple):
    """All a causal layer remembers of the tokens so far.

    Attributes:
        state: S, (B, kv_heads, M, value_dim) with M features per key.
        normalizer: z, (B, kv_heads, M); None for a layer that does not normalise.
        key_max: largest exponents, (B, kv_heads, M), that S and z are relative to; None for a layer
            that does not stabilise.
    """

    state: Tensor
    normalizer: Tensor | None
    key_max: Tensor | None = None


def stabilizes(feature_map: FeatureMap, spec: LinearAttentionSpec) -> bool:
    """The layer computes with exponents."""
    return feature_map.exponential and spec.normalize


def check_map(feature_map: FeatureMap, spec: LinearAttentionSpec) -> None:
    """Refuse a map that does not fit the attention.

    Raises:
        UsageError: it normalises keys over time, and the attention is causal; or it is made for
            another number of heads.
    """
    heads = {spec.q_num_heads, spec.kv_num_heads}
    if feature_map.heads is not None and heads != {feature_map.heads}:
        found = " and ".join(f"{count:,}" for count in sorted(heads, reverse=True))
        raise UsageError(
            f"Feature map {feature_map.kind!r} is made for {feature_map.heads:,} heads; the "
            f"attention has {found}."
        )
    if feature_map.over_time and spec.causal:
        raise UsageError(
            f"Feature map {feature_map.kind!r} normalises keys over the whole sequence: it "
            "needs bidirectional attention (causal=False). Causal ones: 'exp' and 'softmax'."
        )


def initial_state(
    feature_map: FeatureMap, spec: LinearAttentionSpec, like: Tensor, batch: int, value_dim: int
) -> AttentionState:
    """The state before the first token, on the device of ``like``."""
    shape = (batch, spec.kv_num_heads, feature_map.features)
    # States are float32 even where the weights are half precision.
    dtype = torch.promote_types(like.dtype, torch.float32)
    return AttentionState(
        like.new_zeros(*shape, value_dim, dtype=dtype),
        like.new_zeros(*shape, dtype=dtype) if spec.normalize else None,
        like.new_full(shape, LOWEST, dtype=dtype) if stabilizes(feature_map, spec) else None,
    )


def mapped_attention(
    feature_map: FeatureMap,
    spec: LinearAttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: AttentionState | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, AttentionState]:
    """Output (B, T, heads * value_dim) and the state after the last token.

    ``query`` (B, T, q_num_heads * d) and ``key`` (B, T, kv_num_heads * d) are as they are before
    the map; the others are as ``functional.linear_attention`` takes them. Under the delta rules
    features of a key are scaled to norm 1.
    """
    past = AttentionState(None, None) if state is None else state  # type: ignore[arg-type]
    heads = spec.kv_num_heads
    if feature_map.over_time and key_mask is not None:
        key = torch.where(key_mask[..., None], key, torch.finfo(key.dtype).min)
    if feature_map.float32_features:
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(wide), key.to(wide)
    stable = stabilizes(feature_map, spec)
    q = feature_map(query, spec.q_num_heads, "query", stable)
    k = feature_map(key, heads, "key", stable)
    key_max = None
    if stable:
        q, k, lost, key_max = stabilized_exp(
            q,
            k,
            past.key_max,
            key_mask,
            decay,
            q_num_heads=spec.q_num_heads,
            k_num_heads=heads,
            causal=spec.causal,
        )
        decay = lost if spec.causal else None
        rule = "gated" if spec.causal else "linear"
        spec = replace(spec, q_num_heads=spec.output_heads, update_rule=rule)
    elif spec.has_beta:
        k = F.normalize(k.unflatten(-1, (heads, -1)), dim=-1, eps=_KEY_NORM).flatten(-2)
    output, S, z = functional.linear_attention(
        q,
        k,
        value.to(q.dtype),
        past.state,
        past.normalizer,
        decay,
        beta,
        key_mask,
        **spec.attributes(),
    )
    return output.to(value.dtype), AttentionState(S, z if spec.normalize else None, key_max)
