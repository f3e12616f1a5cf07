"""Polynomials by the feature maps of their powers: worked out, and built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from linexport.models.feed_forward import bernstein, least_squares, taylor
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.layer import KernelFeedForward, KernelFeedForwardConfig
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.powers import MAX_COST, Power, choose
from linexport.models.feed_forward.problem import FeedForwardProblem


@dataclass(frozen=True)
class FeedForwardPlan:
    """A form, worked out but not built.

    Attributes:
        polynomials: of the outputs.
        powers: maps of their degrees above 1.
        bound: see ``FeedForwardReport``.
    """

    polynomials: Polynomials
    powers: list[Power]
    bound: float | None


def plan(
    problem: FeedForwardProblem,
    form: str,
    target_error: float | None,
    seed: int,
    max_cost: int = MAX_COST,
) -> FeedForwardPlan:
    """Work out a form.

    Raises:
        UsageError: see ``linearize_feed_forward``.
    """
    if form == "least-squares":
        found = least_squares.fit(problem, target_error)
        return FeedForwardPlan(found, choose(problem, found, target_error), None)
    assert target_error is not None
    if form == "taylor":
        return FeedForwardPlan(*taylor.fit(problem, target_error, seed, max_cost))
    found = bernstein.fit(problem, target_error)
    powers = choose(problem, found, target_error)
    bias = bernstein.bias(problem, found.degree)
    return FeedForwardPlan(found, powers, bias + sum(power.error for power in powers))


def build(
    problem: FeedForwardProblem,
    planned: FeedForwardPlan,
    seed: int,
    after: Following | None = None,
) -> tuple[KernelFeedForward, Tensor]:
    """The layer, with the draws of a seed, and its Phi(W) before it was rounded to float32."""
    config = KernelFeedForwardConfig(
        in_features=problem.rows.shape[1] - 1,
        out_features=len(problem.vectors) if after is None else after.outputs,
        maps=[power.map(seed) for power in planned.powers],
        folded=after is not None,
    )
    layer = KernelFeedForward(config).eval()
    degrees = [power.degree for power in planned.powers]
    return layer, layer.fill(problem.centre, planned.polynomials, degrees, after)
