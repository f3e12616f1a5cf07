"""The definition of WindowAttention: sizes compared, float64 token by token, and PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from linexport.errors import OpError
from linexport.plugins.ops.op import Attributes
from linexport.plugins.ops.shapes import (
    PartialShape,
    rank,
    same_dim,
    same_sequence,
    static_width,
    width_per_head,
)

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = -1e30
"""The maximum of no keys: finite, so that differences are; far below any score."""

BLOCK = 128
"""Queries at most whose scores are computed in one product."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class WindowSpec:
    """Attributes of one node.

    Raises:
        OpError: one of them has no meaning.
    """

    q_num_heads: int
    kv_num_heads: int
    window: int
    sinks: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("q_num_heads", 1), ("kv_num_heads", 1), ("window", 1), ("sinks", 0)):
            found = getattr(self, name)
            if not isinstance(found, int) or found < least:
                raise OpError(f"WindowAttention has {name} {found!r}; expected at least {least}.")
        if self.q_num_heads % self.kv_num_heads:
            raise OpError(
                f"{self.q_num_heads} query heads do not share {self.kv_num_heads} key heads: "
                "expected a multiple."
            )

    @property
    def shared(self) -> int:
        """Query heads of one key head."""
        return self.q_num_heads // self.kv_num_heads

    @property
    def block(self) -> int:
        """Queries in a block: as many as the window has tokens, so that half of a block is seen."""
        return min(max(self.window, 32), BLOCK)

    @classmethod
    def from_attributes(cls, attributes: Attributes) -> WindowSpec:
        """Read a node's attributes.

        Raises:
            OpError: one is missing or has no meaning.
        """
        missing = {"q_num_heads", "kv_num_heads", "window"} - set(attributes)
        if missing:
            raise OpError(f"WindowAttention lacks the attribute {', '.join(sorted(missing))}.")
        return cls(**{f.name: attributes[f.name] for f in fields(cls) if f.name in attributes})

    def check(
        self,
        query: PartialShape,
        key: PartialShape,
        value: PartialShape,
        past_key: PartialShape | None = None,
        past_value: PartialShape | None = None,
        past_seen: PartialShape | None = None,
        past_sink_key: PartialShape | None = None,
        past_sink_value: PartialShape | None = None,
        past_left: PartialShape | None = None,
        key_mask: PartialShape | None = None,
    ) -> tuple[int, int]:
        """Return d and d_v, once the shapes have been compared.

        Raises:
            OpError: they contradict each other or the attributes.
        """
        d_k = width_per_head("query", query, self.q_num_heads)
        if static_width("key", key) != d_k * self.kv_num_heads:
            raise OpError(f"key has width {key[-1]}; expected {self.kv_num_heads} heads of {d_k}.")
        d_v = width_per_head("value", value, self.kv_num_heads)
        batch, length = query[0], query[1]
        for name, given, dims in (("key", key, 3), ("value", value, 3), ("key_mask", key_mask, 2)):
            if given is not None:
                same_sequence(name, given, batch, length, dims)
        keys, values = self.kv_num_heads * d_k, self.kv_num_heads * d_v
        rows, sinks = self.window, self.sinks
        for name, past, sizes in (
            ("past_key", past_key, (rows, keys)),
            ("past_value", past_value, (rows, values)),
            ("past_seen", past_seen, (rows,)),
            ("past_sink_key", past_sink_key, (sinks, keys)),
            ("past_sink_value", past_sink_value, (sinks, values)),
            ("past_left", past_left, (1,)),
        ):
            if past is not None:
                rank(name, past, 1 + len(sizes))
                for what, found, expected in zip(
                    ("batch", "rows", "width"), past, (batch, *sizes), strict=False
                ):
                    same_dim(name, what, found, expected)
        return d_k, d_v


@dataclass
class _Row:
    """Rows of one sequence that its next token may see."""

    keys: list[Array]
    values: list[Array]
    seen: list[bool]
    sink_keys: list[Array]
    sink_values: list[Array]


def window_attention(
    spec: WindowSpec,
    query: Array,
    key: Array,
    value: Array,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_seen: Array | None = None,
    past_sink_key: Array | None = None,
    past_sink_value: Array | None = None,
    past_left: Array | None = None,
    key_mask: NDArray[np.bool_] | None = None,
) -> tuple[Array, ...]:
    """Return the op's outputs in float64, token by token.

    Raises:
        OpError: shapes that do not fit.
    """
    pasts = (past_key, past_value, past_seen, past_sink_key, past_sink_value, past_left)
    optional = (None if x is None else x.shape for x in (*pasts, key_mask))
    d_k, d_v = spec.check(query.shape, key.shape, value.shape, *optional)
    batch, length = query.shape[:2]
    keys, values = key.shape[2], value.shape[2]

    def zeros(*sizes: int) -> Array:
        return np.zeros((batch, *sizes))

    output = zeros(length, spec.q_num_heads * d_v)
    maximum, total = zeros(length, spec.q_num_heads), zeros(length, spec.q_num_heads)
    left_key, left_value, left_mask = zeros(length, keys), zeros(length, values), zeros(length)
    present = [zeros(spec.window, keys), zeros(spec.window, values), zeros(spec.window)]
    sink = [zeros(spec.sinks, keys), zeros(spec.sinks, values), zeros(1)]
    for b in range(batch):
        filled = 0 if past_left is None else int(past_left[b, 0])
        row = _Row(
            list(present[0][b] if past_key is None else past_key[b]),
            list(present[1][b] if past_value is None else past_value[b]),
            list(present[2][b] > 0 if past_seen is None else past_seen[b] > 0),
            [] if past_sink_key is None else list(past_sink_key[b, :filled]),
            [] if past_sink_value is None else list(past_sink_value[b, :filled]),
        )
        for t in range(length):
            left_key[b, t], left_value[b, t] = row.keys.pop(0), row.values.pop(0)
            left = row.seen.pop(0)
            if left and len(row.sink_keys) < spec.sinks:
                row.sink_keys.append(left_key[b, t])
                row.sink_values.append(left_value[b, t])
                left = False
            left_mask[b, t] = left
            row.keys.append(np.asarray(key[b, t], np.float64))
            row.values.append(np.asarray(value[b, t], np.float64))
            row.seen.append(key_mask is None or bool(key_mask[b, t]))
            at = [i for i, seen in enumerate(row.seen) if seen]
            visible = [(row.keys[i], row.values[i]) for i in at]
            visible += zip(row.sink_keys, row.sink_values, strict=True)
            for head in range(spec.q_num_heads):
                own = head // spec.shared
                q = query[b, t, head * d_k : (head + 1) * d_k]
                scores = [spec.scale * q @ k[own * d_k : (own + 1) * d_k] for k, _ in visible]
                largest = max(scores, default=LOWEST)
                weights = [np.exp(score - largest) for score in scores]
                maximum[b, t, head], total[b, t, head] = largest, sum(weights)
                for weight, (_, v) in zip(weights, visible, strict=True):
                    part = weight / sum(weights) * v[own * d_v : (own + 1) * d_v]
                    output[b, t, head * d_v : (head + 1) * d_v] += part
        present[0][b], present[1][b], present[2][b] = row.keys, row.values, row.seen
        sink[2][b] = len(row.sink_keys)
        for i, rows in enumerate((row.sink_keys, row.sink_values)):
            sink[i][b, : len(rows)] = rows if rows else 0
    return (output, maximum, total, left_key, left_value, left_mask, *present, *sink)


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor | None,
    past_value: Tensor | None,
    past_seen: Tensor | None,
    past_sink_key: Tensor | None,
    past_sink_value: Tensor | None,
    past_left: Tensor | None,
    key_mask: Tensor | None,
    q_num_heads: int,
    kv_num_heads: int,
    window: int,
    sinks: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the op's outputs in differentiable PyTorch, computed at least in float32.

    Scores exist for blocks of queries and the keys of their windows. The maximum has no gradient:
    maximum + log(total) has that of the logarithm of the sum.
    """
    import torch
    from torch.nn import functional as F

    spec = WindowSpec(q_num_heads, kv_num_heads, window, sinks, scale)
    pasts = (past_key, past_value, past_seen, past_sink_key, past_sink_value, past_left)
    given = (query, key, value, *pasts, key_mask)
    spec.check(*(None if x is None else tuple(x.shape) for x in given))  # type: ignore[arg-type]
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, length = query.shape[:2]

    def past(x: Tensor | None, like: Tensor, *sizes: int) -> Tensor:
        return like.new_zeros(batch, *sizes) if x is None else x.to(like.dtype)

    flags = query.new_ones(batch, length, dtype=wide)
    if key_mask is not None:
        flags = key_mask.to(wide)
    keys = torch.cat([past(past_key, key, window, key.shape[2]), key], 1)
    values = torch.cat([past(past_value, value, window, value.shape[2]), value], 1)
    seen = torch.cat([past(past_seen, flags, window), flags], 1)
    left = seen[:, :length]
    rank = past(past_left, flags, 1) + left.cumsum(1)
    places = torch.arange(sinks, device=query.device)
    enters = (left * (rank <= sinks))[..., None] * (rank[..., None] == places + 1)
    sink_rows = [
        past(x, of, sinks, of.shape[2]) + (enters.mT.to(wide) @ of[:, :length].to(wide)).to(of)
        for x, of in ((past_sink_key, keys), (past_sink_value, values))
    ]
    size = max(1, min(spec.block, length))
    count = -(-length // size)
    missing = count * size - length
    index = (size * torch.arange(count))[:, None] + torch.arange(1, size + window)

    def blocks(rows: Tensor) -> Tensor:
        """(B, H_k, N, 1, J, width) of rows (B, w + T, H_k * width)."""
        found = F.pad(rows.to(wide), (0, 0, 0, missing))[:, index]
        return found.unflatten(-1, (kv_num_heads, -1)).permute(0, 3, 1, 2, 4).unsqueeze(3)

    q = F.pad(query.to(wide), (0, 0, 0, missing)).unflatten(1, (count, size))
    q = q.unflatten(-1, (kv_num_heads, spec.shared, -1)).permute(0, 3, 1, 4, 2, 5) * scale
    i, j = torch.arange(size)[:, None], torch.arange(size + window - 1)
    band = ((j >= i) & (j < i + window)).to(query.device)
    visible = band & (F.pad(seen, (0, missing))[:, index] > 0)[:, None, :, None, None]
    scores, v = q @ blocks(keys).mT, blocks(values)
    k_s, v_s = (x.to(wide).unflatten(-1, (kv_num_heads, -1)).transpose(1, 2) for x in sink_rows)
    k_s, v_s = k_s[:, :, None, None], v_s[:, :, None, None]
    after = F.pad(rank[..., None] > places, (0, 0, 0, missing)).unflatten(1, (count, size))
    visible = torch.cat([visible.expand(-1, -1, -1, -1, size, -1), after[:, None, :, None]], -1)
    scores = torch.where(visible, torch.cat([scores, q @ k_s.mT], -1), LOWEST)
    maximum = scores.detach().amax(-1, keepdim=True)
    weights = torch.where(visible, (scores - maximum).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    near, first = weights.split((size + window - 1, sinks), -1)
    output = (near @ v + first @ v_s) / total.clamp(min=torch.finfo(wide).tiny)

    def tokens(x: Tensor) -> Tensor:
        """(B, T, H * width) of (B, H_k, N, G, C, width)."""
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)[:, :length]

    return (
        tokens(output).to(value.dtype),
        tokens(maximum),
        tokens(total),
        keys[:, :length],
        values[:, :length],
        (left > 0) & (rank > sinks),
        keys[:, length:],
        values[:, length:],
        seen[:, length:],
        *sink_rows,
        rank[:, -1:].clamp(max=sinks) if length else past(past_left, flags, 1),
    )
