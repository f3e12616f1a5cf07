"""Which feature map computes each power of v.x', how wide it has to be, and what it costs.

An exact map has C(d + k, k) features. A random one of m features adds c_ik^2 MSE_k(v_i, x') / m to
the expected squared error of output i, so that

    m_k = ceil(n out / eps * max_i c_ik^2 max_x m MSE_k(v_i, x'))

keeps the sum over the n degrees and all outputs at eps. Of the maps that will do, the one with the
fewest multiply-adds is taken. |v_i|^(2k) |x'|^(2k) in place of m MSE_k is too little: a tensor
sketch has that only up to a factor of about 3^k, random monomials up to (d + 1)^k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linexport.errors import UsageError
from linexport.models.feature_maps import monomials
from linexport.models.feature_maps.base import Array
from linexport.models.feature_maps.tensor_sketch import variance
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.problem import FeedForwardProblem

MAX_COST = 10_000_000
"""Multiply-adds for one token, and so about as many weights, that a replacement may have."""

_NO_STATE = 1e9
"""For the limit on the state of attention, of which there is none here."""

_LINES = 16
"""Degrees a table shows."""


@dataclass(frozen=True)
class Power:
    """One degree and its map.

    Attributes:
        degree: k.
        kind: of the feature map.
        features: M.
        multiply_adds: for the features of one x, without their product with Phi(W).
        error: bound on what it adds to E|y^ - y|^2.
    """

    degree: int
    kind: str
    features: int
    multiply_adds: int
    error: float = 0.0

    def map(self, seed: int) -> dict[str, Any]:
        """Its ``kind`` and ``options``."""
        options: dict[str, object] = {"degree": self.degree}
        if self.kind in ("random_monomials", "tensor_sketch"):
            drawn = np.random.SeedSequence([seed, self.degree]).generate_state(1)[0]
            options |= {"features": self.features, "seed": int(drawn)}
        else:
            options["memory_limit_gib"] = _NO_STATE
        if self.kind == "quadratic":
            del options["degree"]
        return {"kind": self.kind, "options": options}


def exact(degree: int, width: int) -> Power:
    """All monomials of x', ``width`` wide."""
    features = monomials.count_monomials(width, degree)
    kind = "quadratic" if degree == 2 else "monomials"
    return Power(degree, kind, features, degree * features)


def random_monomials(degree: int, features: int, error: float) -> Power:
    """Products of ``degree`` components, and a factor."""
    return Power(degree, "random_monomials", features, degree * features, error)


def tensor_sketch(degree: int, features: int, width: int, error: float) -> Power:
    """Products of ``degree`` transforms, in complex numbers."""
    transforms = width * degree * (features + 2)
    products = 2 * (degree - 1) * (features + 2)
    return Power(degree, "tensor_sketch", features, transforms + products, error)


def choose(
    problem: FeedForwardProblem, polynomials: Polynomials, budget: float | None
) -> list[Power]:
    """A map for every degree above 1; random maps add at most ``budget`` to E|y^ - y|^2.

    None: exact maps only.
    """
    width = problem.rows.shape[1]
    if budget is None:
        return [exact(k, width) for k in polynomials.terms()]
    errors = Variance(problem.rows, polynomials.vectors)
    found = []
    for k in polynomials.terms():
        squares = polynomials.coefficients[:, k] ** 2
        share = budget / polynomials.degree
        drawn = len(squares) * float((squares * errors.random_monomials(k)).max())
        m = _ceiling(drawn / share)
        even, hashed = errors.sketch_size(k, squares * len(squares), share)
        candidates = [
            exact(k, width),
            random_monomials(k, m, drawn / m),
            tensor_sketch(k, even, width, hashed),
        ]
        found.append(min(candidates, key=lambda p: p.multiply_adds + p.features * len(squares)))
    return found


@dataclass(frozen=True)
class Variance:
    """Errors of the random maps over rows x', for each v.

    As the maps state it in ``theoretical_error``, for all pairs at once.
    """

    rows: Array
    vectors: Array

    def random_monomials(self, degree: int) -> Array:
        """Largest m MSE, (out,): ((d + 1) v^2 . x'^2)^k - (v . x')^(2k)."""
        second = self.rows.shape[1] * (self.rows**2 @ (self.vectors**2).T)
        product = (self.rows @ self.vectors.T) ** 2
        return np.asarray((second**degree - product**degree).max(0))

    def sketch_size(self, degree: int, weights: Array, share: float) -> tuple[int, float]:
        """Fewest features of a tensor sketch, even, with weights (out,) times MSE <= share.

        And what is reached. w (A/m + B/m^2) = share has one positive root m for B >= 0; where
        B < 0, A/m alone is an upper bound.
        """
        rows, vectors = self.rows**2, (self.vectors**2).T
        first, second = variance(
            (self.rows @ self.vectors.T) ** 2,
            rows.sum(1)[:, None] * vectors.sum(0),
            rows @ vectors,
            degree,
        )
        first, second = weights * first, weights * np.maximum(second, 0)
        half = first / (2 * share)
        m = 2 * _ceiling(float((half + np.sqrt(half**2 + second / share)).max()) / 2)
        return m, float((first / m + second / m / m).max())


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of one replacement, for one x.

    Attributes:
        width: of x'.
        outputs: rows of Phi(W).
        powers: maps of the degrees above 1.
        inside: rows of W where the linear layer after the activation is folded into Phi(W); else
            None.
    """

    width: int
    outputs: int
    powers: Sequence[Power]
    inside: int | None = None

    @property
    def features(self) -> int:
        """M of Psi(x)."""
        return self.width + sum(p.features for p in self.powers)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of Psi(x) and of its product with Phi(W)."""
        return self.width * self.outputs + sum(self._of(p) for p in self.powers)

    @property
    def before(self) -> int:
        """Multiply-adds of W x, and of the product after it where that is folded."""
        if self.inside is None:
            return (self.width - 1) * self.outputs
        return (self.width - 1 + self.outputs) * self.inside

    def _of(self, power: Power) -> int:
        return power.multiply_adds + power.features * self.outputs

    def table(self) -> str:
        """Return a line for each degree, the sum, and the cost of the layers that it replaces."""
        rows: list[tuple[str, ...]] = [("degree", "map", "features", "multiply-adds")]
        rows += [("0, 1", "identity", *_numbers(self.width, self.width * self.outputs))]
        lines = [(str(p.degree), p.kind, *_numbers(p.features, self._of(p))) for p in self.powers]
        if len(lines) > _LINES:
            lines[_LINES - 2 : -1] = [("...", "", "", "")]
        rows += lines
        rows += [("all", "", *_numbers(self.features, self.multiply_adds))]
        rows += [("before", "", "", *_numbers(self.before))]
        sizes = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{a:<{sizes[0]}}  {b:<{sizes[1]}}  {c:>{sizes[2]}}  {d:>{sizes[3]}}"
            for a, b, c, d in rows
        )


def instead_of(form: str, target_error: float | None) -> str:
    """Return what to try where a form is refused: a larger error, or another form."""
    others = " or ".join(repr(name) for name in ("least-squares", "low-rank") if name != form)
    larger = "Take" if target_error is None else "Ask for a larger target_error, or take"
    return f"{larger} form={others}"


def check_cost(
    multiply_adds: int, most: int, table: str, form: str, target_error: float | None
) -> None:
    """Refuse what costs more than ``most`` multiply-adds.

    Raises:
        UsageError: with the table, and what to take instead.
    """
    if multiply_adds > most:
        (cost,) = _numbers(multiply_adds)
        raise UsageError(
            f"The replacement would cost {cost} multiply-adds and as many weights for every "
            f"token, and max_cost is {most:,}.\n{table}\n"
            f"{instead_of(form, target_error)}, or raise max_cost."
        )


def _ceiling(value: float) -> int:
    """At least 1; of what no float holds, a number beyond every budget."""
    return max(1, math.ceil(value)) if math.isfinite(value) else 10**300


def _numbers(*values: int) -> list[str]:
    return [f"{v:,}" if v < 10**12 else f"{float(v):.1e}" for v in values]
