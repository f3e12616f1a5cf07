"""Near keys exactly and far ones by a feature map, in float64 over all pairs of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def near_far(
    query: Array,
    key: Array,
    value: Array,
    features: tuple[Array, Array],
    window: int,
    sinks: int = 0,
    far_gain: Array | None = None,
    key_mask: NDArray[np.bool_] | None = None,
) -> Array:
    """Return (B, H, T, d_v).

    Args:
        query: (B, H, T, d).
        key: (B, H_k, T, d).
        value: (B, H_k, T, d_v).
        features: phi(q) (B, H, T, M) and phi(k) (B, H_k, T, M).
        window: last tokens that are near; a hidden token takes a place among them.
        sinks: first tokens that are near; hidden ones are not counted.
        far_gain: logarithm of the factor of phi(q).phi(k), (H).
        key_mask: (B, T), False for tokens that are hidden.
    """
    batch, heads, length, d = query.shape
    phi_q, phi_k = features
    gain = np.exp(np.zeros(heads) if far_gain is None else far_gain)
    shown = np.ones((batch, length), bool) if key_mask is None else key_mask
    output = np.zeros((batch, heads, length, value.shape[-1]))
    for b in range(batch):
        first = np.flatnonzero(shown[b])[:sinks]
        for h in range(heads):
            own = h // (heads // key.shape[1])
            for t in range(length):
                seen = np.flatnonzero(shown[b, : t + 1])
                near = (seen > t - window) | np.isin(seen, first)
                scores = key[b, own, seen] @ query[b, h, t] / np.sqrt(d)
                highest = scores[near].max(initial=0.0)
                kernel = gain[h] * (phi_k[b, own, seen] @ phi_q[b, h, t]) * np.exp(-highest)
                weights = np.where(near, np.exp(np.where(near, scores - highest, 0.0)), kernel)
                if len(seen):
                    output[b, h, t] = weights @ value[b, own, seen] / weights.sum()
    return output


def heads_first(packed: Tensor, heads: int) -> Array:
    """(B, T, H * width) as (B, H, T, width) in float64."""
    return packed.detach().double().unflatten(-1, (heads, -1)).transpose(1, 2).numpy()
