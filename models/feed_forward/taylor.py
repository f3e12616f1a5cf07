"""Unbiased composition of the power series of an activation, with frozen draws.

    f(t) = linear t + sum_K c_K t^g(K),   g(K) = first + 2 K
    f(w.x) ~ linear w.x + mean_j (c_K/p_K) phi_g(K)(w) . phi_g(K)(x),   K = K_j
    geometric    P(K = k) = p_k = rho (1 - rho)^k,   E[K] = 1/rho - 1 (WRONG elsewhere: + 1)
    Poisson      P(K = k) = p_k = e^-lambda lambda^k / k!,   E[K] = lambda

The linear term, of GELU x/2, is kept exactly. phi_g is one random monomial, drawn anew for every
K_j, so that the draws with the same K together are a map of that many features, and for J draws

    Var = (sum_k c_k^2/p_k ((d+1) w^2 . x^2)^g(k) - (f - linear)^2) / J        squares by component

with the value of MSE_k, not a bound on it: see docs/math.md, "Unbiased power series". Of a series
that converges everywhere, as GELU's, c_k^2 / p_k falls under both laws. Of one with a finite radius
it grows without bound under Poisson's, and the variance is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from linexport.errors import UsageError
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward.activations import Activation
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.powers import Cost, Power, check_cost, random_monomials
from linexport.models.feed_forward.problem import FeedForwardProblem


@dataclass(frozen=True)
class Degrees:
    """A law of K.

    Attributes:
        kind: "geometric" or "poisson".
        parameter: rho or lambda.
    """

    kind: Literal["geometric", "poisson"]
    parameter: float

    @property
    def mean(self) -> float:
        """E[K]."""
        return 1 / self.parameter - 1 if self.kind == "geometric" else self.parameter

    def probabilities(self) -> Array:
        """p_k, (TERMS,)."""
        k = np.arange(TERMS)
        if self.kind == "geometric":
            return np.asarray(self.parameter * (1 - self.parameter) ** k)
        logs = k * math.log(self.parameter) - self.parameter
        return np.asarray(np.exp(logs - np.array([math.lgamma(i + 1) for i in k])))


GEOMETRIC = tuple(Degrees("geometric", i / 20) for i in range(6, 20))
POISSON = tuple(Degrees("poisson", 2 ** (i / 2)) for i in range(-8, 9))
"""Laws that are tried; the one with the least variance is taken."""

TERMS = 128
"""Terms of the series that are summed or drawn: what is left out has a probability below 2e-20."""

_MOST_DRAWS = 10**9
_AT_ONCE = 16
"""Rows whose terms are summed together."""


def fit(
    problem: FeedForwardProblem, target_error: float, seed: int, max_cost: int
) -> tuple[Polynomials, list[Power], float]:
    """The average of as many draws as keep E|y^ - y|^2 at ``target_error`` over the rows.

    Returns:
        The polynomials, the maps of their powers, and the expected squared error.

    Raises:
        UsageError: the activation has no power series, it does not converge on the data, or it
            needs more multiply-adds than ``max_cost`` or more draws than can be made.
    """
    law, single = best(problem)
    draws_needed = single / target_error
    if not draws_needed < _MOST_DRAWS:
        expected = np.minimum(draws_needed, 1e300) * law.probabilities()
        powers = _powers(problem.activation, np.ceil(expected[expected >= 1]))
        cost = Cost(problem.rows.shape[1], len(problem.vectors), powers)
        check_cost(cost.multiply_adds, max_cost, cost.table(), "taylor", target_error)
        raise UsageError(
            f"target_error {target_error:g} needs {draws_needed:.2g} draws of degrees, and at most "
            f"{_MOST_DRAWS:,} are made. Ask for a larger target_error."
        )
    count = max(1, math.ceil(draws_needed))
    return (*drawn(problem, law, count, seed), single / count)


def drawn(
    problem: FeedForwardProblem, law: Degrees, count: int, seed: int
) -> tuple[Polynomials, list[Power]]:
    """The average of ``count`` draws of K, and the maps that belong to it."""
    times = draw(law, count, seed)
    weights = average(problem.activation, law, times)
    polynomials = Polynomials(np.tile(weights, (len(problem.vectors), 1)), problem.vectors)
    return polynomials, _powers(problem.activation, times)


def _powers(activation: Activation, times: NDArray[np.generic]) -> list[Power]:
    return [
        random_monomials(activation.first + 2 * k, int(features), 0.0)
        for k, features in enumerate(times)
        if features
    ]


def best(problem: FeedForwardProblem) -> tuple[Degrees, float]:
    """The law of K, and the largest variance of one draw over the rows, summed over the outputs.

    Raises:
        UsageError: no power series, or none that converges on the data.
    """
    f = problem.activation
    if f.terms is None:
        raise UsageError(
            f"{f.name} has no power series around 0. Use form='least-squares' or 'bernstein'."
        )
    second = problem.rows.shape[1] * (problem.rows**2 @ (problem.vectors**2).T)
    # The ratio of terms is (second / radius^2)^2 / (1 - rho) in the end.
    laws = [law for law in GEOMETRIC if second.max() < f.radius**2 * math.sqrt(1 - law.parameter)]
    laws += POISSON if math.isinf(f.radius) else ()
    if not laws:
        limit = f.radius**2 * math.sqrt(1 - GEOMETRIC[0].parameter)
        raise UsageError(
            f"The power series of {f.name} has the radius {f.radius:.3g}; random monomials of it "
            f"have a finite variance where (d + 1) w^2 . x^2 < {limit:.3g}, and the calibration "
            f"data reach {second.max():.3g}. Use form='least-squares' or 'bernstein'."
        )
    t = problem.rows @ problem.vectors.T
    largest = np.zeros(len(laws))
    for start in range(0, len(t), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        here = variance(f, laws, second[part], t[part]).sum(2).max(1)
        largest = np.maximum(largest, here)
    return laws[int(largest.argmin())], float(largest.min())


def variance(activation: Activation, laws: Sequence[Degrees], second: Array, t: Array) -> Array:
    """Variance of one draw at each t, (laws, *t.shape).

    ``second`` is the second moment (d + 1) w^2 . x^2 of a random monomial of degree 1.
    """
    assert activation.terms is not None
    degrees = activation.first + 2 * np.arange(TERMS)
    # Where a probability is too small for a float, so is the square of the coefficient.
    weights = np.stack([1 / np.maximum(law.probabilities(), 1e-290) for law in laws])
    # Coefficients may be too small for a float, and moments too large.
    with np.errstate(divide="ignore", over="ignore"):
        logs = 2 * np.log(np.abs(activation.terms(TERMS)))
        terms = np.exp(logs + np.log(second)[..., None] * degrees)
        total = np.moveaxis(terms @ weights.T, -1, 0)
    return np.asarray(total - (activation(t) - activation.linear * t) ** 2)


def draw(law: Degrees, count: int, seed: int) -> NDArray[np.int64]:
    """Number of times each K occurs in ``count`` draws, (TERMS,)."""
    p = law.probabilities()
    p[-1] = 1 - p[:-1].sum()
    return draws.generator(seed).multinomial(count, np.clip(p, 0, 1))


def average(activation: Activation, law: Degrees, times: NDArray[np.int64]) -> Array:
    """Coefficients of the average of these draws, by the power of t, up to the highest drawn."""
    assert activation.terms is not None
    highest = int(np.flatnonzero(times)[-1])
    found = np.zeros(activation.first + 2 * highest + 1)
    found[1] = activation.linear
    taken = activation.terms(highest + 1) / law.probabilities()[: highest + 1]
    found[activation.first :: 2] = taken * times[: highest + 1] / times.sum()
    return found
