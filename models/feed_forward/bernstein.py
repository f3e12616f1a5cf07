"""Bernstein polynomials of an activation on the intervals of the calibration data.

    B_n f(t) = sum_j f(a + (b - a) j/n) C(n, j) s^j (1 - s)^(n - j),   s = (t - a)/(b - a)
    |B_n f - f| <= (b - a)^2/(8 n) max|f''| + (b - a)/(4 sqrt n) kink

The second term is that of a jump of f', as of ReLU: for S = a + (b - a) Binomial(n, s)/n,
E relu(S) - relu(t) <= E|S - t|/2. WRONG elsewhere: half of the first term, for GELU.

Monomial coefficients are taken of u = 2 s - 1 in [-1, 1], where those of the basis are integers.
"""

from __future__ import annotations

import math

import numpy as np

from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward.activations import Activation
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.problem import FeedForwardProblem

SAFE_DEGREE = 25
"""Largest degree of the powers; higher ones are built of Chebyshev polynomials.

Measured: the coefficients alternate and grow, and beyond it float32, in which the layer runs, loses
more than 1e-4 of max|f| to rounding on some interval, of tanh first.
"""


def fit(problem: FeedForwardProblem, target_error: float) -> Polynomials:
    """Polynomials in powers of u whose bias, squared and summed, is at most ``target_error``."""
    n = degree(problem, target_error)
    assert n <= SAFE_DEGREE
    return Polynomials(coefficients(problem, n), problem.scaled)


def degree(problem: FeedForwardProblem, target_error: float) -> int:
    """Smallest n with ``bias(problem, n) <= target_error``.

    Of a smooth f it is ceil(sqrt(out) max_i (b_i - a_i)^2 max|f''| / (8 sqrt(target_error))).
    """
    width, f = 2 * problem.half.max(), problem.activation
    smooth, kink = width**2 * f.curvature / 8, width * f.kink / 4
    each = math.sqrt(target_error / len(problem.half))
    # smooth / n + kink / sqrt(n) = each
    root = (kink + math.sqrt(kink**2 + 4 * smooth * each)) / (2 * each)
    return max(1, math.ceil(root**2))


def bias(problem: FeedForwardProblem, degree: int) -> float:
    """Bound of |B_n f(W x) - f(W x)|^2, the same for each output."""
    width = 2 * float(problem.half.max())
    return len(problem.half) * bound(problem.activation, width, degree) ** 2


def bound(activation: Activation, width: float, degree: int) -> float:
    """Bound of |B_n f - f| on an interval of that width."""
    smooth = width**2 / (8 * degree) * activation.curvature
    return smooth + width / (4 * math.sqrt(degree)) * activation.kink


def coefficients(problem: FeedForwardProblem, degree: int) -> Array:
    """Coefficients of B_n f in powers of u, (out, n + 1)."""
    nodes = np.linspace(-1, 1, degree + 1)
    values = problem.activation(problem.middle[:, None] + problem.half[:, None] * nodes)
    return np.asarray(values @ basis(degree))


def values(problem: FeedForwardProblem, degree: int, u: Array) -> Array:
    """B_n f at u (points,), from the definition, (out, points)."""
    nodes = np.linspace(-1, 1, degree + 1)
    j = np.arange(degree + 1)
    # Logarithms: n over j is too large for a float from n = 1030 on, and s^j too small.
    choices = np.array(
        [math.lgamma(degree + 1) - math.lgamma(i + 1) - math.lgamma(degree - i + 1) for i in j]
    )
    logs = choices + j * np.log((1 + u[:, None]) / 2) + (degree - j) * np.log((1 - u[:, None]) / 2)
    at_nodes = problem.activation(problem.middle[:, None] + problem.half[:, None] * nodes)
    return np.asarray(at_nodes @ np.exp(logs).T)


def basis(degree: int) -> Array:
    """Coefficients of C(n, j) ((1 + u)/2)^j ((1 - u)/2)^(n - j), (j, power of u).

    Exact integers over 2^n, each rounded once.
    """
    found = np.empty((degree + 1, degree + 1))
    for j in range(degree + 1):
        product = [1]
        for factor in range(degree):
            sign = 1 if factor < j else -1
            shifted = [0, *product]
            product = [a + sign * b for a, b in zip([*product, 0], shifted, strict=True)]
        found[j] = [math.comb(degree, j) * c / 2**degree for c in product]
    return found
