"""Softmax attention to near keys and a feature map for far ones, under one denominator.

    o_t = (sum_near exp(q.k / sqrt d) v + c sum_far phi(q).phi(k) v) / (the same without v)

    near    the last w tokens, t among them, and the sinks: the first s tokens
    far     all older ones, as linear attention over the tokens that left the window
    c       exp(far_gain) > 0 of each query head: phi(q).phi(k) need not have the scale of exp

Both parts are computed as means, and joined by g = sigmoid(log sum_near - log c sum_far):
o_t = g near_t + (1 - g) far_t, which overflows at no scale of the scores. The state is w + s rows
and the far sums, whose last column is the denominator. Features of exponential maps are computed as
they are: exponents above 88 overflow, unlike those of ``LinearAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.models import functional
from linexport.models.attention import AttentionConfig, LinearAttention
from linexport.models.config import bounded
from linexport.models.feature_maps import FeatureMap
from linexport.plugins.ops.stabilized_exp import LOWEST
from linexport.plugins.ops.window_attention import WindowSpec


class WindowState(NamedTuple):
    """All a layer remembers of the tokens so far.

    Attributes:
        key, value: the last w rows, (B, w, kv_heads * d) and (B, w, kv_heads * d_v).
        seen: 1 for rows of a token, (B, w).
        sink_key, sink_value: the first s rows that left the window.
        left: how many of these there are, (B, 1).
        far: sums of phi(k) [v, 1]^T, (B, kv_heads, M, d_v + 1).
    """

    key: Tensor
    value: Tensor
    seen: Tensor
    sink_key: Tensor
    sink_value: Tensor
    left: Tensor
    far: Tensor


class NearFarParts(NamedTuple):
    """Means over near and far keys (B, T, H, d_v), and logarithms of their sums (B, T, H, 1)."""

    near: Tensor
    far: Tensor
    near_sum: Tensor
    far_sum: Tensor

    def joined(self, far_gain: Tensor) -> Tensor:
        """Return the mean over all keys, (B, T, H * d_v), for a far_gain (H)."""
        share = (self.near_sum - self.far_sum - far_gain[:, None].to(self.far_sum)).sigmoid()
        return (share * self.near + (1 - share) * self.far).flatten(2)


def check_windowed(feature_map: FeatureMap, causal: bool) -> None:
    """Refuse a map whose sums cannot join those of exponentials.

    Raises:
        UsageError: its kernel can be negative, or the attention is not causal.
    """
    if not feature_map.kernel_positive:
        raise UsageError(
            f"Feature map {feature_map.kind!r} has a kernel that can be negative: its sums cannot "
            "share a denominator with those of a window. Choose one with a positive kernel, such "
            "as elu1, taylor2 or favor+."
        )
    if not causal:
        raise UsageError(
            "Attention with a window is causal: a key leaves the window for the far sums when "
            "later tokens come. Choose a map without a window for bidirectional attention."
        )


def near_and_far(
    feature_map: FeatureMap,
    spec: WindowSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: WindowState | None = None,
    key_mask: Tensor | None = None,
) -> tuple[NearFarParts, WindowState]:
    """Return both parts and the state after the last token.

    ``query`` (B, T, H * d), ``key`` (B, T, kv_heads * d) and ``value`` (B, T, kv_heads * d_v) are
    as they are before the map, and after rotary positions.
    """
    past = (None,) * 7 if state is None else state
    heads = spec.kv_num_heads
    near = functional.window_attention(query, key, value, past[:6], key_mask, spec=spec)
    values = near.left_value.unflatten(-1, (heads, -1))
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1).flatten(2)
    left_key = near.left_key
    if feature_map.float32_features or feature_map.exponential:
        wide = torch.promote_types(query.dtype, torch.float32)
        query, left_key, values = query.to(wide), left_key.to(wide), values.to(wide)
    sums, far, _ = functional.linear_attention(
        feature_map(query, spec.q_num_heads, "query"),
        feature_map(left_key, heads, "key"),
        values,
        past[6],
        key_mask=near.left_mask,
        q_num_heads=spec.q_num_heads,
        kv_num_heads=heads,
    )
    sums = sums.unflatten(-1, (spec.q_num_heads, -1))
    numerator, denominator = sums[..., :-1], sums[..., -1:].to(near.total.dtype)
    there = denominator > 0
    denominator = torch.where(there, denominator, 1.0)
    total = near.total[..., None]
    parts = NearFarParts(
        near.output.unflatten(-1, (spec.q_num_heads, -1)).to(denominator.dtype),
        numerator / denominator,
        near.maximum[..., None] + torch.where(total > 0, total, 1.0).log(),
        torch.where(there, denominator.log(), LOWEST),
    )
    return parts, WindowState(*near[6:], far)


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(AttentionConfig):
    """Sizes and choices of one layer.

    Attributes:
        window: w, the tokens that are seen exactly.
        sinks: s, the first tokens, which remain exact.
    """

    window: int = 64
    sinks: int = bounded(0, at_least=0)


class WindowedAttention(LinearAttention):
    """Multi-head attention of that form, with the projections of ``LinearAttention``.

    Raises:
        UsageError: as ``LinearAttention``; the map or the attention does not fit; or fields of
            config that only linear attention has.
    """

    def __init__(self, config: WindowedConfig, causal: bool = True) -> None:
        own = {f.name: getattr(config, f.name) for f in fields(AttentionConfig)}
        super().__init__(AttentionConfig(**own), causal)
        check_windowed(self.feature_map, causal)
        heads, kv_heads = self.spec.q_num_heads, self.spec.kv_num_heads
        plain = config.update_rule == "linear" and config.normalize and config.scale == 1.0
        if not plain or heads % kv_heads:
            raise UsageError(
                f"Attention with a window has update_rule {config.update_rule!r}, scale "
                f"{config.scale}, normalize {config.normalize} and {kv_heads} key/value heads for "
                f"{heads}; expected 'linear', 1.0, True and a divisor."
            )
        width = config.width_per_head()
        self.window = WindowSpec(heads, kv_heads, config.window, config.sinks, width**-0.5)
        self.far_gain = nn.Parameter(torch.zeros(heads))

    def initial_state(self, batch: int) -> WindowState:  # type: ignore[override]
        """The state before the first token."""
        spec, weight = self.window, self.query.weight
        keys, values = self.key.weight.shape[0], self.value.weight.shape[0]
        wide = torch.promote_types(weight.dtype, torch.float32)
        far = (self.feature_map.features, self.value_dim + 1)
        return WindowState(
            weight.new_zeros(batch, spec.window, keys),
            weight.new_zeros(batch, spec.window, values),
            weight.new_zeros(batch, spec.window, dtype=wide),
            weight.new_zeros(batch, spec.sinks, keys),
            weight.new_zeros(batch, spec.sinks, values),
            weight.new_zeros(batch, 1, dtype=wide),
            weight.new_zeros(batch, spec.kv_num_heads, *far, dtype=wide),
        )

    def forward(  # type: ignore[override]
        self, x: Tensor, key_mask: Tensor | None = None, state: WindowState | None = None
    ) -> tuple[Tensor, WindowState]:
        """Output (B, T, dim) and the state after the last token; see ``LinearAttention``."""
        projected = self.query(x), self.key(x), self.value(x)
        parts, state = near_and_far(self.feature_map, self.window, *projected, state, key_mask)
        return self.output(parts.joined(self.far_gain).to(x.dtype)), state
