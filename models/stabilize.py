"""``linexport.StabilizedExp`` in PyTorch: exponential features whose attention cannot overflow.

Formulas: ``linexport.plugins.ops.stabilized_exp``. The maximum is taken without a gradient:
attention that normalises does not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.plugins.ops import stabilized_exp as op

Stabilized = tuple[Tensor, Tensor, Tensor, Tensor]
"""query_features, key_features, decay and present_key_max."""


def stabilized_exp(
    query: Tensor,
    key: Tensor,
    past_key_max: Tensor | None = None,
    key_mask: Tensor | None = None,
    decay: Tensor | None = None,
    *,
    q_num_heads: int,
    k_num_heads: int,
    causal: bool = True,
) -> Stabilized:
    """Features (B, T, H * M) of exponents, their decay and the maxima (B, H_k, M) to go on from.

    Computed, and returned, at least in float32.

    Raises:
        OpError: shapes that contradict each other.
    """
    inputs = (query, key, past_key_max, key_mask, decay)
    if torch.compiler.is_exporting():
        out: Stabilized = torch.ops.linexport.stabilized_exp(
            *inputs, q_num_heads, k_num_heads, int(causal)
        )
        return out
    return plain_stabilized_exp(*inputs, q_num_heads, k_num_heads, int(causal))


def plain_stabilized_exp(
    query: Tensor,
    key: Tensor,
    past_key_max: Tensor | None,
    key_mask: Tensor | None,
    decay: Tensor | None,
    q_num_heads: int,
    k_num_heads: int,
    causal: int,
) -> Stabilized:
    """``stabilized_exp`` in plain PyTorch."""
    inputs = (query, key, past_key_max, key_mask, decay)
    shapes = (None if x is None else tuple(x.shape) for x in inputs)
    features = op.check(q_num_heads, k_num_heads, causal, *shapes)  # type: ignore[arg-type]
    dtype = torch.promote_types(query.dtype, torch.float32)
    b, a = query.to(dtype), key.to(dtype)
    if decay is not None:
        decay = decay.to(dtype).unflatten(-1, (k_num_heads, -1))
        decay = decay.expand(*decay.shape[:-1], features).flatten(-2)
    if key_mask is not None:
        a = torch.where(key_mask[..., None], a, op.LOWEST)
        decay = None if decay is None else torch.where(key_mask[..., None], decay, 0.0)
    start = a.new_full((a.shape[0], 1, a.shape[2]), op.LOWEST)
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
    """m_t = max(m_{t-1} + g_t, a_t) for a_0, a_1 ... and g_1, g_2 ...

    Over windows whose length doubles, so that decays are added up and never subtracted.
    """
    g = torch.cat([torch.zeros_like(seen[:, :1]), decay], 1)
    m, size = seen, 1
    while size < seen.shape[1]:
        reached = torch.maximum(m[:, size:], m[:, :-size] + g[:, size:])
        m = torch.cat([m[:, :size], reached], 1)
        g = torch.cat([g[:, :size], g[:, size:] + g[:, :-size]], 1)
        size *= 2
    return m
