"""Every form, worked out but not built: its cost, its bound, and how to build it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from linexport.errors import UsageError
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward import bernstein, chebyshev, chebyshev_layer, low_rank
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.linear_activation import NewLayer
from linexport.models.feed_forward.power_plan import FeedForwardPlan, build, plan
from linexport.models.feed_forward.powers import Cost, Power
from linexport.models.feed_forward.problem import FeedForwardProblem

Exactly = Callable[[Array], Array]
"""Outputs in float64 of rows x', without the rounding of weights."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """A layer that can be built.

    Attributes:
        degree: see ``FeedForwardReport``.
        features: likewise.
        multiply_adds: likewise.
        before: multiply-adds of what it takes the place of.
        after: the linear layer that is folded in; else None.
        outside: see ``FeedForwardReport``.
        table: of the cost, for people.
        build: makes the layer, in eval mode and float32.
        bound: of E|y^ - y|^2, y before ``after``.
        rank: of a low-rank form.
        powers: feature maps of the powers.
    """

    degree: int
    features: int
    multiply_adds: int
    before: int
    after: Following | None
    outside: float
    table: str
    build: Callable[[], tuple[NewLayer, Exactly]]
    bound: float | None = None
    rank: int | None = None
    powers: tuple[Power, ...] = ()


def work_out(
    problem: FeedForwardProblem,
    form: str,
    after: Following | None,
    target_error: float | None,
    seed: int,
    max_cost: int,
) -> Replacement:
    """Return the replacement of one form, which may cost more than ``max_cost``.

    Raises:
        UsageError: see ``linearize_feed_forward``.
    """
    if form == "low-rank":
        return _of_low_rank(problem, after, low_rank.fit(problem, after, target_error, max_cost))
    if form == "chebyshev":
        assert target_error is not None
        on_box = chebyshev_layer.on_box(problem)
        return _of_products(*on_box, after, *chebyshev.fit(on_box[0], target_error))
    if form == "bernstein":
        assert target_error is not None
        return _of_bernstein(problem, after, target_error, seed)
    return _of_powers(problem, after, plan(problem, form, target_error, seed, max_cost), seed)


def _of_powers(
    problem: FeedForwardProblem, after: Following | None, planned: FeedForwardPlan, seed: int
) -> Replacement:
    cost, after = _folded_if_cheaper(problem, planned, after)

    def built() -> tuple[NewLayer, Exactly]:
        layer, weight = build(problem, planned, seed, after)
        return layer, partial(layer.exactly, weight)

    return Replacement(
        degree=planned.polynomials.degree,
        features=cost.features,
        multiply_adds=cost.multiply_adds,
        before=cost.before,
        after=after,
        outside=problem.outside,
        table=cost.table(),
        build=built,
        bound=planned.bound,
        powers=tuple(planned.powers),
    )


def _folded_if_cheaper(
    problem: FeedForwardProblem, planned: FeedForwardPlan, after: Following | None
) -> tuple[Cost, Following | None]:
    """The cost, and the layer after it if that is to be folded in."""
    width, inside = problem.rows.shape[1], len(problem.vectors)
    unfolded = Cost(width, inside, planned.powers)
    if after is None:
        return unfolded, None
    folded = Cost(width, after.outputs, planned.powers, inside)
    if folded.multiply_adds < unfolded.multiply_adds + inside * after.outputs:
        return folded, after
    return unfolded, None


def _of_low_rank(
    problem: FeedForwardProblem, after: Following | None, planned: low_rank.LowRankPlan
) -> Replacement:
    before = low_rank.cost_before(problem, after)
    return Replacement(
        degree=2,
        features=planned.linear.shape[1] + planned.products.shape[1],
        multiply_adds=planned.multiply_adds,
        before=before,
        after=after,
        outside=problem.outside,
        table=f"rank {planned.rank}: {planned.multiply_adds:,} multiply-adds, before {before:,}",
        build=lambda: (planned.layer(problem, after is not None), planned.exactly),
        rank=planned.rank,
    )


def _of_products(
    problem: FeedForwardProblem,
    box: chebyshev_layer.Box,
    after: Following | None,
    series: Array,
    bound: float,
) -> Replacement:
    """Series of T_k(u_i) as products of Chebyshev polynomials of the inputs."""
    inside, degree = len(problem.vectors), series.shape[1] - 1
    cost = partial(chebyshev_layer.multiply_adds, problem, degree=degree)
    if after is not None and cost(after) >= cost(None) + inside * after.outputs:
        after = None
    planned = chebyshev_layer.ChebyshevPlan(problem, box, series, after)
    before = low_rank.cost_before(problem, after)
    return Replacement(
        degree=degree,
        features=planned.features,
        multiply_adds=cost(after),
        before=before,
        after=after,
        outside=planned.outside,
        table=f"degree {degree}: {planned.features:,} products of Chebyshev polynomials, "
        f"{cost(after):,} multiply-adds, before {before:,}",
        build=lambda: (planned.layer(), planned.exactly),
        bound=bound,
    )


def _of_bernstein(
    problem: FeedForwardProblem, after: Following | None, target_error: float, seed: int
) -> Replacement:
    """By maps of the powers or by products of Chebyshev polynomials, whichever costs less."""
    found = []
    if bernstein.degree(problem, target_error) <= bernstein.SAFE_DEGREE:
        planned = plan(problem, "bernstein", target_error, seed)
        found.append(_of_powers(problem, after, planned, seed))
    in_box, box = chebyshev_layer.on_box(problem)
    degree = bernstein.degree(in_box, target_error)
    if degree <= chebyshev.HIGHEST:
        bound = bernstein.bias(in_box, degree)
        series = chebyshev.from_values(bernstein.values(in_box, degree, chebyshev.nodes(degree)))
        found.append(_of_products(in_box, box, after, series, bound))
    if not found:
        highest = chebyshev.HIGHEST
        raise UsageError(
            f"target_error {target_error:g} needs Bernstein polynomials of degree {degree:,}, and "
            f"at most degree {highest} is built. At {highest} the bound on the squared bias is "
            f"{bernstein.bias(in_box, highest):.3g}: ask for no less, or use form='chebyshev', "
            "whose degrees are far lower, for one to four inputs, or form='least-squares' for more."
        )
    return min(found, key=lambda one: one.multiply_adds - one.before)


def error_bound(found: Replacement) -> float | None:
    """Bound of E|y^ - y|^2, y after the layer that is folded in."""
    if found.bound is None or found.after is None:
        return found.bound
    return found.bound * float(np.linalg.norm(found.after.weight, 2)) ** 2
