"""Polynomials of least squared error over the measured distribution of w.x + b.

    c_i = argmin sum_x (f(t_i) - sum_k c_ik u_i^k)^2        x in the calibration data

Found in Legendre polynomials of u, which are far better conditioned than its powers.
"""

from __future__ import annotations

import numpy as np
from numpy.polynomial import legendre

from linexport.errors import UsageError
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.problem import FeedForwardProblem

DEGREE = 2
"""Default degree: the highest whose features are exact at any width in use."""

HIGHEST = 12
"""Largest degree tried for a target error."""


def fit(problem: FeedForwardProblem, target_error: float | None) -> Polynomials:
    """Fit the lowest degree whose squared error, summed over outputs, averages ``target_error``.

    Raises:
        UsageError: no degree up to ``HIGHEST`` does; names the best.
    """
    if target_error is None:
        return of_degree(problem, DEGREE)
    want = problem.outputs(problem.rows)
    highest = min(HIGHEST, len(problem.rows) - 1)
    error = np.inf
    for degree in range(1, highest + 1):
        found = of_degree(problem, degree)
        error = float(((found.at(problem.rows) - want) ** 2).sum(1).mean())
        if error <= target_error:
            return found
    raise UsageError(
        f"No polynomial up to degree {highest} comes within target_error {target_error:g}: the "
        f"squared error of degree {highest} is {error:.3g}. Ask for no less."
    )


def of_degree(problem: FeedForwardProblem, degree: int) -> Polynomials:
    """The best of one degree.

    Raises:
        UsageError: too few rows of calibration data to determine it.
    """
    if len(problem.rows) <= degree:
        raise UsageError(
            f"{len(problem.rows)} rows cannot determine polynomials of degree {degree}; give more "
            "calibration data."
        )
    u, want = problem.rows @ problem.scaled.T, problem.outputs(problem.rows)
    powers = _powers(degree)
    found = [
        np.linalg.lstsq(legendre.legvander(u_i, degree), f_i, rcond=None)[0] @ powers
        for u_i, f_i in zip(u.T, want.T, strict=True)
    ]
    return Polynomials(np.stack(found), problem.scaled)


def _powers(degree: int) -> Array:
    """Coefficients of Legendre polynomials in powers of u, (degree + 1, degree + 1)."""
    found = np.zeros((degree + 1, degree + 1))
    for k in range(degree + 1):
        found[k, : k + 1] = legendre.leg2poly([0.0] * k + [1.0])
    return found
