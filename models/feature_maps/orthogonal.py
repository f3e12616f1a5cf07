"""Covariance of two projections of one orthogonal block, in float64.

For w_1, w_2 of norms chi(d) in orthogonal directions, uniform together, and a = d/2

    E exp(w_1.z) exp(w_2.z) = 1F1(d; a; |z|^2/2)       E cos(w_1.z) cos(w_2.z) = 1F1(d; a; -|z|^2/2)

while independent ones have exp(|z|^2) and exp(-|z|^2). By Kummer's transformation 1F1(d; a; x) is
exp(x) 1F1(-a; a; -x), a sum over a Poisson distribution of factors that are at most 1:

    exp(-|x|) sum_s r_s (-x)^s / s!,   r_s = prod_{i < s} (i - a)/(i + a)

Derivation: docs/math.md, "Orthogonal projections".
"""

from __future__ import annotations

import math

import numpy as np

from linexport.models.feature_maps.base import Array

_MOST = 1000.0
"""Size of x beyond which exp(x) overflows float64."""


def paired(count: int, width: int) -> int:
    """Ordered pairs of different columns of one block, of ``count`` columns in all."""
    blocks, rest = divmod(count, width)
    return blocks * width * (width - 1) + rest * (rest - 1)


def covariance(x: Array, width: int) -> Array:
    """1F1(d; d/2; x) - exp(2x), for x > 0 divided by exp(2x); none of it overflows.

    Args:
        x: |z|^2 / 2 for exponentials, its negative for cosines.
        width: d.
    """
    a, size = width / 2, np.minimum(np.abs(x), _MOST)
    most = float(size.max(initial=0.0))
    # Poisson's tail beyond this is below the resolution of float64.
    last = math.ceil(most + 12 * math.sqrt(most) + 40)
    # The half on each side keeps every share in range: exp(-500) to exp(500).
    half = np.exp(-size / 2)
    found, share, ratio = half, half, 1.0
    signed = np.where(x > 0, -size, size)
    for s in range(1, last + 1):
        ratio *= (s - 1 - a) / (s - 1 + a)
        if not ratio:  # of even d it is a polynomial
            break
        share = share * signed / s
        found = found + ratio * share
    return np.asarray(found * half - np.exp(np.minimum(2 * x, 0)))
