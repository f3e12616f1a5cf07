"""Chebyshev polynomials of an activation, on intervals that w.x + b does not leave.

    f(middle + half u) = sum_k c_k T_k(u)        T_(k+1) = 2 u T_k - T_(k-1),   u in [-1, 1]
    |p_n - f| <= sum_(n<k<=N) |c_k| + 4 V / (pi (N - 1))

p_n are the first n + 1 terms. The c_k are computed at N + 1 nodes; the last term, for f' that jumps
by V = half kink, is what nodes miss (Trefethen, Approximation Theory and Approximation Practice,
theorem 7.2). Of smooth activations the terms fall geometrically, and nothing is left after N.

Unlike powers of u, the T_k are bounded by 1 and so are no obstacle to high degrees in float32.
"""

from __future__ import annotations

import math

import numpy as np

from linexport.errors import UsageError
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward.problem import FeedForwardProblem

HIGHEST = 256
"""Largest degree that is built: float32 then still holds every activation to 1e-4 of max|f|."""

_TERMS = 1024
"""N: terms of the series that are looked at."""


def fit(problem: FeedForwardProblem, target_error: float) -> tuple[Array, float]:
    """Series whose error, squared and summed over the outputs, is at most ``target_error``.

    Returns:
        Coefficients (out, n + 1), and the bound of the squared error.

    Raises:
        UsageError: they need a degree above ``HIGHEST``.
    """
    found = series(problem, _TERMS)
    squared = bias(problem, found)
    n = int((squared <= target_error).argmax())
    if not squared[n] <= target_error or n > HIGHEST:
        raise UsageError(
            f"target_error {target_error:g} needs Chebyshev polynomials of a degree above "
            f"{HIGHEST}. At {HIGHEST} the bound on the squared error is {squared[HIGHEST]:.3g}: "
            "ask for no less, or use form='least-squares'."
        )
    return found[:, : max(n, 1) + 1], float(squared[n])


def series(problem: FeedForwardProblem, terms: int) -> Array:
    """Coefficients of T_0 to T_terms, (out, terms + 1)."""
    u = nodes(terms)
    return from_values(problem.activation(problem.middle[:, None] + problem.half[:, None] * u))


def bias(problem: FeedForwardProblem, coefficients: Array) -> Array:
    """Bound of sum_i (p_n - f)_i^2 at any u, for every degree n below the number of terms."""
    beyond = np.cumsum(np.abs(coefficients[:, :0:-1]), axis=1)[:, ::-1]
    missed = 4 * problem.half * problem.activation.kink / (math.pi * (_TERMS - 1))
    return np.asarray(((beyond + missed[:, None]) ** 2).sum(0))


def nodes(degree: int) -> Array:
    """The n + 1 zeros of T_(n+1)."""
    return np.asarray(np.cos(_angles(degree)))


def from_values(values: Array) -> Array:
    """Coefficients of the polynomials with these values (..., n + 1) at ``nodes(n)``."""
    n = values.shape[-1] - 1
    cosines = np.cos(np.outer(_angles(n), np.arange(n + 1)))
    found = values @ cosines * (2 / (n + 1))
    found[..., 0] /= 2
    return np.asarray(found)


def _angles(degree: int) -> Array:
    return np.asarray((np.arange(degree + 1) + 0.5) * (np.pi / (degree + 1)), np.float64)
