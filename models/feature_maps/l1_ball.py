"""The L1 ball smoothed by a Gaussian: P(|u + tau g|_1 <= delta) for g ~ N(0, I), in float64.

The sum of independent |u_i + tau g_i|, one coordinate after another:

    F_1(s) = P(|u_1 + tau g_1| <= s)        F_i(s) = int_0^s f_i(t) F_{i-1}(s - t) dt

with f_i the density of |u_i + tau g_i|. Both are analytic on [0, delta], so that interpolation at
Chebyshev nodes and Gauss-Legendre quadrature reach the precision of float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.polynomial import chebyshev, legendre
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NODES = 48
_NODES_PER_WIDTH = 8
_MOST_NODES = 400
_AT_ONCE = 32

_erf = np.vectorize(math.erf, otypes=[float])


def smoothed_indicator(offsets: Array, delta: float, tau: float) -> Array:
    """The indicator of |u|_1 <= delta convolved with N(0, tau^2 I), for rows u, (n, d); (n,)."""
    count = min(_MOST_NODES, math.ceil(_NODES + _NODES_PER_WIDTH * delta / tau))
    nodes = np.cos(np.pi * (np.arange(count) + 0.5) / count)
    at = (nodes + 1) * delta / 2
    points, weights = legendre.leggauss(count)
    # t runs over [0, s] for every s: (nodes, points).
    t = at[:, None] * (points + 1) / 2
    basis = chebyshev.chebvander(2 * (at[:, None] - t) / delta - 1, count - 1)
    to_coefficients = np.linalg.inv(chebyshev.chebvander(nodes, count - 1))
    end = chebyshev.chebvander(np.array([1.0]), count - 1)[0]
    interpolate = basis.reshape(-1, count) @ to_coefficients
    rows, found = np.atleast_2d(offsets), []
    for part in np.array_split(rows, -(-len(rows) // _AT_ONCE)):
        F = np.stack([_folded_cdf(at, u, tau) for u in part[:, 0]])
        for means in part[:, 1:].T:
            f = _folded_density(t, means[:, None, None], tau) * (weights * at[:, None] / 2)
            F = (f * (F @ interpolate.T).reshape(f.shape)).sum(-1)
        found.append(F @ to_coefficients.T @ end)
    return np.clip(np.concatenate(found), 0.0, 1.0)


def volume(width: int, delta: float) -> float:
    """Volume of the L1 ball, (2 delta)^d / d!."""
    return math.exp(width * math.log(2 * delta) - math.lgamma(width + 1))


def uniform_in_ball(random: np.random.Generator, count: int, width: int, delta: float) -> Array:
    """(width, count): points as columns, exponentials over the sum of one more of them, signed."""
    parts = random.standard_exponential((width + 1, count))
    signs = np.where(random.random((width, count)) < 0.5, -1.0, 1.0)
    return np.asarray(delta * signs * parts[:-1] / parts.sum(0))


def _folded_cdf(s: Array, mean: float, tau: float) -> Array:
    scale = math.sqrt(2) * tau
    return np.asarray((_erf((s - mean) / scale) + _erf((s + mean) / scale)) / 2)


def _folded_density(t: Array, mean: float, tau: float) -> Array:
    both = np.exp(-(((t - mean) / tau) ** 2) / 2) + np.exp(-(((t + mean) / tau) ** 2) / 2)
    return np.asarray(both / (math.sqrt(2 * math.pi) * tau))
