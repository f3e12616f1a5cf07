"""Replace y = f(W x + b) by a feature map and a matrix product, and say what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.models.feed_forward import bernstein, least_squares, taylor
from linexport.models.feed_forward.layer import KernelFeedForward, KernelFeedForwardConfig
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.powers import Cost, Power, choose
from linexport.models.feed_forward.problem import FeedForwardProblem, checked_problem

FORMS = ("least-squares", "bernstein", "taylor")

MAX_COST = 10_000_000
"""Multiply-adds for one token, and so about as many weights, that a replacement may have."""

_ROUNDING = 1e-2
_AT_ONCE = 32
"""Rows run together: features are wide."""


@dataclass(frozen=True)
class FeedForwardReport:
    """Form, cost and error of one replacement.

    Errors are mean squared distances |y^ - y|^2 over rows, summed over the outputs.

    Attributes:
        form: one of ``FORMS``.
        activation: its name.
        degree: of the polynomials.
        powers: the feature map of each degree above 1.
        features: M, the width of Psi(x).
        multiply_adds: for one token, features and product.
        multiply_adds_before: of W x.
        parameters: numbers the layer stores.
        parameters_before: of W and b.
        error: on the held-out rows.
        relative_error: its root, as a share of the root mean square of y.
        bound: what the theory says E|y^ - y|^2 is at most, over the draws, for x whose
            t = W x + b lies in the intervals of the calibration data (Bernstein) or for the rows
            that it was computed from (Taylor); None where there is no theory.
        outside: share of the held-out t that lie outside those intervals.
        rounding: by how much float32 changes y, relative to y.
        table: of the cost, for people.
    """

    form: str
    activation: str
    degree: int
    powers: tuple[Power, ...]
    features: int
    multiply_adds: int
    multiply_adds_before: int
    parameters: int
    parameters_before: int
    error: float
    relative_error: float
    bound: float | None
    outside: float
    rounding: float
    table: str


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


def linearize_feed_forward(
    linear: nn.Linear,
    activation: str | nn.Module,
    calibration: Tensor,
    form: str = "least-squares",
    *,
    target_error: float | None = None,
    max_cost: int = MAX_COST,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[KernelFeedForward, FeedForwardReport]:
    """A layer that takes the place of ``activation(linear(x))``.

    Args:
        linear: W and b; read, not kept.
        activation: f: one of gelu, gelu-tanh, silu, relu, tanh, or a module such as ``nn.GELU()``.
        calibration: inputs x of ``linear`` on real data, (..., d). A quarter of the rows, drawn by
            the seed, is held out to measure the error.
        form: "least-squares": polynomials fitted to the measured distribution of W x + b;
            "bernstein": Bernstein polynomials on intervals from the calibration data;
            "taylor": the power series, unbiased, with frozen draws.
        target_error: expected squared error of y, summed over its components, for one token.
            Bernstein keeps its squared bias and its variance at it each, least squares its
            fitting error and its variance, Taylor its variance. Least squares without one is of
            degree 2 and exact.
        max_cost: multiply-adds for one token; the cost is known before anything is built.
        seed: of the held-out rows and of all draws.
        say: given the cost table, before the layer is built.

    Returns:
        The layer in eval mode, float32, on the CPU, and its report.

    Raises:
        UsageError: calibration data that are empty, constant, not finite or of the wrong shape;
            intervals that degenerate; a degree above the numerically safe one; a cost above
            ``max_cost``, with the table; an unknown form or activation.
    """
    _check(form, target_error, max_cost)
    problem = checked_problem(linear, activation, calibration, seed)
    planned = plan(problem, form, target_error, seed)
    cost = Cost(problem.rows.shape[1], len(problem.vectors), planned.powers)
    say(cost.table())
    cost.check(max_cost)
    layer, weight = build(problem, planned, seed)
    rounding = _rounding(problem, planned, layer, weight)
    error, size = _judge(problem, layer)
    report = FeedForwardReport(
        form=form,
        activation=problem.activation.name,
        degree=planned.polynomials.degree,
        powers=tuple(planned.powers),
        features=cost.features,
        multiply_adds=cost.multiply_adds,
        multiply_adds_before=cost.before,
        parameters=sum(b.numel() for b in layer.buffers()),
        parameters_before=sum(p.numel() for p in linear.parameters()),
        error=error,
        relative_error=math.sqrt(error / size),
        bound=planned.bound,
        outside=problem.outside,
        rounding=rounding,
        table=cost.table(),
    )
    return layer, report


def _check(form: str, target_error: float | None, max_cost: int) -> None:
    if form not in FORMS:
        raise UsageError(f"Unknown form {form!r}; expected one of {', '.join(FORMS)}.")
    if target_error is None and form != "least-squares":
        raise UsageError(
            f"form={form!r} needs a target_error: the squared error of y to expect for one token."
        )
    if target_error is not None and not (math.isfinite(target_error) and target_error > 0):
        raise UsageError(f"target_error is {target_error}; expected a positive number.")
    if max_cost < 1:
        raise UsageError(f"max_cost is {max_cost}; expected at least 1.")


def plan(
    problem: FeedForwardProblem, form: str, target_error: float | None, seed: int
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
        return FeedForwardPlan(*taylor.fit(problem, target_error, seed))
    found = bernstein.fit(problem, target_error)
    powers = choose(problem, found, target_error)
    bias = bernstein.bias(problem, found.degree)
    return FeedForwardPlan(found, powers, bias + sum(power.error for power in powers))


def build(
    problem: FeedForwardProblem, planned: FeedForwardPlan, seed: int
) -> tuple[KernelFeedForward, Tensor]:
    """The layer, with the draws of a seed, and its Phi(W) before it was rounded to float32."""
    config = KernelFeedForwardConfig(
        in_features=problem.rows.shape[1] - 1,
        out_features=len(problem.vectors),
        maps=[power.map(seed) for power in planned.powers],
    )
    layer = KernelFeedForward(config).eval()
    degrees = [power.degree for power in planned.powers]
    return layer, layer.fill(problem.centre, planned.polynomials, degrees)


def _rounding(
    problem: FeedForwardProblem, planned: FeedForwardPlan, layer: KernelFeedForward, weight: Tensor
) -> float:
    """By how much float32 changes the output, relative to it.

    Raises:
        UsageError: so much that the layer is of no use.
    """
    rows = problem.held_out[:_AT_ONCE]
    want, got = layer.exactly(weight, rows), _run(problem, layer, rows)
    rounding = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not rounding <= _ROUNDING:
        raise UsageError(
            f"In float32 the layer is off by {rounding:.2g} of its output: powers up to degree "
            f"{planned.polynomials.degree} of inputs this wide cancel. Ask for a larger "
            "target_error, or take form='least-squares'."
        )
    return rounding


def _judge(problem: FeedForwardProblem, layer: KernelFeedForward) -> tuple[float, float]:
    """Mean |y^ - y|^2 and mean |y|^2 over the held-out rows."""
    want = problem.outputs(problem.held_out)
    got = _run(problem, layer, problem.held_out)
    return float(((got - want) ** 2).sum(1).mean()), float((want**2).sum(1).mean())


@torch.inference_mode()
def _run(problem: FeedForwardProblem, layer: KernelFeedForward, rows: np.ndarray) -> np.ndarray:
    """The layer as it runs, in float32, on rows x'."""
    x = torch.from_numpy(rows[:, :-1] + problem.centre).float()
    return torch.cat([layer(part) for part in x.split(_AT_ONCE)]).double().numpy()
