"""Coefficients of power series around 0, in float64, without their zeros.

    GELU(t) = t/2 + t^2/sqrt(2 pi) sum_k (-1)^k t^(2k) / ((2k+1) 2^k k!)        everywhere
    SiLU(t) = t/2 + t/2 tanh(t/2)                                              |t| < pi
    GELU(t) = t/2 + t/2 tanh(s (t + c t^3)), the tanh form                     |t| < 2.82...

tanh of a polynomial p follows from y' = (1 - y^2) p', coefficient by coefficient.
"""

from __future__ import annotations

import math

import numpy as np

from linexport.models.feature_maps.base import Array

_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715
"""s and c of the tanh form of GELU, as torch has them."""

GELU_TANH_RADIUS = float(np.abs(np.roots([_SCALE * _CUBIC, 0, _SCALE, -0.5j * math.pi])).min())
"""Distance of the nearest pole: s (t + c t^3) = i pi / 2."""


def gelu(count: int) -> Array:
    """Coefficients of t^2, t^4, ..."""
    found = np.empty(count)
    power = 1 / math.sqrt(2 * math.pi)
    for k in range(count):
        found[k] = power / (2 * k + 1)
        power /= -2 * (k + 1)
    return found


def tanh(count: int) -> Array:
    """Coefficients of t, t^3, ... in tanh."""
    return _tanh_of(np.array([0.0, 1.0]), count)


def silu(count: int) -> Array:
    """Coefficients of t^2, t^4, ... in SiLU."""
    return np.asarray(tanh(count) * 0.25 ** np.arange(1, count + 1))


def gelu_tanh(count: int) -> Array:
    """Coefficients of t^2, t^4, ... in GELU by tanh."""
    inner = _SCALE * np.array([0.0, 1.0, 0.0, _CUBIC])
    return _tanh_of(inner, count) / 2


def _tanh_of(inner: Array, count: int) -> Array:
    """Odd coefficients of tanh(p(t)) for an odd polynomial p."""
    slope = inner[1:] * np.arange(1, len(inner))
    y = np.zeros(2 * count)
    rest = np.zeros(2 * count)  # 1 - y^2, as far as it is known
    rest[0] = 1.0
    for i in range(2 * count - 1):
        if i:
            rest[i] = -(y[: i + 1] @ y[i::-1])
        taken = slope[: i + 1]
        y[i + 1] = (taken @ rest[i - np.arange(len(taken))]) / (i + 1)
    return y[1::2]
