"""Feature maps in NumPy, in float64: what the kernels' are compared with on a GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def features(kind: str, width: int) -> int:
    """Features of a head of that width; favor+ has as many as components."""
    pairs = width * (width + 1) // 2
    return {"taylor2": 1 + width + pairs, "quadratic": pairs}.get(kind, width)


def phi(kind: str, x: Array, w: Array | None = None) -> Array:
    """Features (..., M) of x (..., d); w (d, M) is the projection of favor+.

    Formulas and their sources are in docs/math.md, "Feature maps".
    """
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "elu1":
        return np.maximum(x, 0) + np.exp(np.minimum(x, 0))
    if kind == "exp":
        return np.exp(x)
    if kind == "quadratic":
        return _pairs(x)
    if kind not in ("taylor2", "favor+"):
        return x
    x = x * x.shape[-1] ** -0.25
    if kind == "taylor2":
        return np.concatenate([np.ones_like(x[..., :1]), x, _pairs(x) * 0.5**0.5], -1)
    assert w is not None
    square = (x * x).sum(-1, keepdims=True) / 2
    return np.asarray(np.exp(x @ w - square) * w.shape[1] ** -0.5)


def _pairs(x: Array) -> Array:
    i, j = np.triu_indices(x.shape[-1])
    return np.asarray(x[..., i] * x[..., j] * np.where(i == j, 1, 2**0.5))
