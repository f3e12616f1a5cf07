"""The definition of StabilizedExp: sizes compared, float64 token by token, and PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from linexport.errors import OpError
from linexport.plugins.ops.op import (
    Attributes,
    Node,
    reads_causal,
)
from linexport.plugins.ops.shapes import (
    PartialShape,
    one_of,
    rank,
    same_dim,
    same_sequence,
    static_width,
    width_per_head,
)

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = -1e30
"""The maximum of no keys: finite, so that differences are; far below any exponent."""

INPUTS = ("query", "key", "past_key_max", "key_mask", "decay")

Array = NDArray[np.float64]


def check(
    q_num_heads: object,
    k_num_heads: object,
    causal: object,
    query: PartialShape,
    key: PartialShape,
    past_key_max: PartialShape | None = None,
    key_mask: PartialShape | None = None,
    decay: PartialShape | None = None,
) -> int:
    """M, once attributes and shapes have been compared.

    Raises:
        OpError: they contradict each other.
    """
    for name, heads in (("q_num_heads", q_num_heads), ("k_num_heads", k_num_heads)):
        if not isinstance(heads, int) or heads < 1:
            raise OpError(f"StabilizedExp has {name} {heads!r}; expected at least 1.")
    assert isinstance(q_num_heads, int)
    assert isinstance(k_num_heads, int)
    larger, smaller = max(q_num_heads, k_num_heads), min(q_num_heads, k_num_heads)
    if larger % smaller:
        raise OpError(f"{larger} heads do not share {smaller}: expected a multiple.")
    features = width_per_head("query", query, q_num_heads)
    if static_width("key", key) != features * k_num_heads:
        raise OpError(f"key has width {key[-1]}; expected {k_num_heads} heads of {features}.")
    if not causal and (past_key_max is not None or decay is not None):
        raise OpError("causal=0 reads the whole sequence at once; it takes no past and no decay.")
    batch, length = query[0], query[1]
    for name, other, dims in (("key", key, 3), ("key_mask", key_mask, 2), ("decay", decay, 3)):
        if other is not None:
            same_sequence(name, other, batch, length, dims)
    if past_key_max is not None:
        rank("past_key_max", past_key_max, 3)
        same_dim("past_key_max", "batch", past_key_max[0], batch)
        same_dim("past_key_max", "heads", past_key_max[1], k_num_heads)
        same_dim("past_key_max", "features", past_key_max[2], features)
    if decay is not None:
        widths = (k_num_heads, k_num_heads * features)
        one_of("decay", static_width("decay", decay), widths)
    return features


def stabilized_exp(
    q_num_heads: int,
    k_num_heads: int,
    causal: bool,
    query: Array,
    key: Array,
    past_key_max: Array | None = None,
    key_mask: NDArray[np.bool_] | None = None,
    decay: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The definition above in float64, token by token.

    query_features (B, T, max(H_q, H_k) * M), key_features and decay (B, T, H_k * M), and
    present_key_max (B, H_k, M).

    Raises:
        OpError: shapes that do not fit.
    """
    optional = (None if x is None else x.shape for x in (past_key_max, key_mask, decay))
    features = check(q_num_heads, k_num_heads, causal, query.shape, key.shape, *optional)
    batch, length = query.shape[:2]
    heads, served = k_num_heads, max(q_num_heads, k_num_heads)
    a = np.float64(key).reshape(batch, length, heads, features)
    b = np.float64(query).reshape(batch, length, q_num_heads, features)
    b = np.repeat(b, served // q_num_heads, axis=2)
    g = np.zeros(a.shape)
    if decay is not None:
        per_head = decay.shape[2] // heads
        g = g + np.float64(decay).reshape(batch, length, heads, per_head)
    if key_mask is not None:
        a = np.where(key_mask[:, :, None, None], a, LOWEST)
        g = np.where(key_mask[:, :, None, None], g, 0.0)
    m = np.full((batch, heads, features), LOWEST)
    if past_key_max is not None:
        m = np.asarray(past_key_max, np.float64)
    if not causal:
        m = a.max(1, initial=LOWEST)
    phi_q, phi_k, decays = np.zeros(b.shape), np.zeros(a.shape), np.zeros(a.shape)
    for t in range(length):
        before = m
        if causal:
            m = np.maximum(m + g[:, t], a[:, t])
            decays[:, t] = g[:, t] + before - m
        phi_k[:, t] = np.exp(a[:, t] - m)
        exponent = b[:, t] + np.repeat(m, served // heads, axis=1)
        phi_q[:, t] = np.exp(exponent - exponent.max(-1, keepdims=True))
    packed = (x.reshape(batch, length, x.shape[2] * features) for x in (phi_q, phi_k, decays))
    return (*packed, m)  # type: ignore[return-value]


def eager(
    query: Tensor,
    key: Tensor,
    past_key_max: Tensor | None,
    key_mask: Tensor | None,
    decay: Tensor | None,
    q_num_heads: int,
    k_num_heads: int,
    causal: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the op's outputs, in differentiable PyTorch and at least float32.

    The maximum is taken without a gradient: attention that normalises does not depend on it.
    """
    import torch

    inputs = (query, key, past_key_max, key_mask, decay)
    shapes = (None if x is None else tuple(x.shape) for x in inputs)
    features = check(q_num_heads, k_num_heads, causal, *shapes)  # type: ignore[arg-type]
    dtype = torch.promote_types(query.dtype, torch.float32)
    b, a = query.to(dtype), key.to(dtype)
    if decay is not None:
        decay = decay.to(dtype).unflatten(-1, (k_num_heads, -1))
        decay = decay.expand(*decay.shape[:-1], features).flatten(-2)
    if key_mask is not None:
        a = torch.where(key_mask[..., None], a, LOWEST)
        decay = None if decay is None else torch.where(key_mask[..., None], decay, 0.0)
    start = a.new_full((a.shape[0], 1, a.shape[2]), LOWEST)
    if past_key_max is not None:
        start = past_key_max.to(dtype).flatten(1).unsqueeze(1)
    with torch.no_grad():
        seen = torch.cat([start, a], 1)
        running = seen.cummax(1).values if decay is None else _decayed_max(seen, decay)
        maximum = running[:, 1:] if causal else running[:, -1:].expand_as(a)
        lost = running[:, :-1] - maximum if causal else torch.zeros_like(a)
    served = max(q_num_heads, k_num_heads)
    heads = b.unflatten(-1, (q_num_heads, features))
    heads = heads.repeat_interleave(served // q_num_heads, 2).unflatten(2, (k_num_heads, -1))
    exponent = heads + maximum.unflatten(-1, (k_num_heads, 1, features))
    exponent = exponent - exponent.detach().amax(-1, keepdim=True)
    return (
        exponent.exp().flatten(2),
        (a - maximum).exp(),
        lost if decay is None else decay + lost,
        running[:, -1].unflatten(-1, (k_num_heads, features)),
    )


def _decayed_max(seen: Tensor, decay: Tensor) -> Tensor:
    """Return m_t = max(m_{t-1} + g_t, a_t) for a_0, a_1 ... and g_1, g_2 ...

    Over windows whose length doubles, so that decays are added up and never subtracted.
    """
    import torch

    g = torch.cat([torch.zeros_like(seen[:, :1]), decay], 1)
    m, size = seen, 1
    while size < seen.shape[1]:
        reached = torch.maximum(m[:, size:], m[:, :-size] + g[:, size:])
        m = torch.cat([m[:, :size], reached], 1)
        g = torch.cat([g[:, :size], g[:, size:] + g[:, :-size]], 1)
        size *= 2
    return m


def heads_of(attributes: Attributes) -> tuple[object, object]:
    """Return H_q and H_k as they are given, unchecked."""
    return attributes.get("q_num_heads"), attributes.get("k_num_heads")


def width_of(node: Node) -> int:
    """Return M of a node, checked."""
    return check(*heads_of(node.attributes), reads_causal(node.attributes), **node.shapes)
