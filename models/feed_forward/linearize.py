"""Replace y = f(W x + b) by a feature map and a matrix product, and say what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.linear_activation import NewLayer
from linexport.models.feed_forward.powers import MAX_COST, check_cost, instead_of
from linexport.models.feed_forward.problem import FeedForwardProblem, checked_problem
from linexport.models.feed_forward.replacements import Exactly, error_bound, work_out
from linexport.models.feed_forward.report import FORMS, FeedForwardReport

_ROUNDING = 1e-2
_AT_ONCE = 32
"""Rows run together: features are wide."""


def linearize_feed_forward(
    linear: nn.Linear,
    activation: str | nn.Module,
    calibration: Tensor,
    form: str = "least-squares",
    *,
    following: nn.Linear | None = None,
    target_error: float | None = None,
    max_cost: int = MAX_COST,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[NewLayer, FeedForwardReport]:
    """A layer that takes the place of ``activation(linear(x))``.

    Where x has more than a few components, every form but "low-rank" costs more than the layer
    itself, 10 to 150 times as much on those measured.

    Args:
        linear: W and b; read, not kept.
        activation: f: one of gelu, gelu-tanh, silu, relu, tanh, or a module such as ``nn.GELU()``.
        calibration: inputs x of ``linear`` on real data, (..., d). A quarter of the rows, drawn by
            the seed, is held out to measure the error.
        form: "least-squares": polynomials fitted to the measured distribution of W x + b;
            "chebyshev": Chebyshev polynomials of inputs in the box of the calibration data, of
            any degree, for one to four inputs;
            "bernstein": Bernstein polynomials, in that box or on intervals from the calibration
            data, whichever costs less;
            "taylor": the power series, unbiased, with frozen draws;
            "low-rank": a quadratic in few directions, of the rank with the least error that costs
            less than what it replaces, and at most ``max_cost``.
        following: the linear layer that alone is given the output. Where that costs less, it is
            folded into the new one, which then takes its place as well: ``config["folded"]``.
        target_error: expected squared error of y, summed over its components, for one token.
            Chebyshev keeps its squared bias at it, Bernstein that and its variance each, least
            squares its fitting error and its variance, Taylor its variance. Least squares without
            one is of degree 2 and exact. A low-rank form takes the smallest rank that does.
        max_cost: multiply-adds for one token; the cost is known before anything is built.
        seed: of the held-out rows and of all draws.
        say: given the cost table, before the layer is built.

    Returns:
        The layer in eval mode, float32, on the CPU, and its report.

    Raises:
        UsageError: calibration data that are empty, constant, not finite or of the wrong shape;
            intervals that degenerate; a degree above the numerically safe one; a cost above
            ``max_cost``, with the table; a layer that float32 changes by more than a hundredth of
            its output; an unknown form or activation.
    """
    _check(form, target_error, max_cost)
    problem = checked_problem(linear, activation, calibration, seed)
    after = None if following is None else Following.of(following.weight, following.bias)
    found = work_out(problem, form, after, target_error, seed, max_cost)
    say(found.table)
    check_cost(found.multiply_adds, max_cost, found.table, form, target_error)
    layer, exactly = found.build()
    rounding = _rounding(problem, layer, exactly)
    if not rounding <= _ROUNDING:
        raise UsageError(
            f"In float32 the layer is off by {rounding:.2g} of its output, and {_ROUNDING:g} is "
            f"allowed: powers up to degree {found.degree} of inputs this wide cancel. "
            f"{instead_of(form, target_error)}."
        )
    error, size = _judge(problem, layer, found.after)
    replaced = [linear] if found.after is None or following is None else [linear, following]
    report = FeedForwardReport(
        form=form,
        activation=problem.activation.name,
        degree=found.degree,
        folded=found.after is not None,
        rank=found.rank,
        powers=found.powers,
        features=found.features,
        multiply_adds=found.multiply_adds,
        multiply_adds_before=found.before,
        parameters=sum(b.numel() for b in layer.buffers()),
        parameters_before=sum(p.numel() for one in replaced for p in one.parameters()),
        error=error,
        relative_error=math.sqrt(error / size),
        bound=error_bound(found),
        outside=found.outside,
        rounding=rounding,
        table=found.table,
    )
    return layer, report


def _check(form: str, target_error: float | None, max_cost: int) -> None:
    if form not in FORMS:
        raise UsageError(f"Unknown form {form!r}; expected one of {', '.join(FORMS)}.")
    if target_error is None and form in ("chebyshev", "bernstein", "taylor"):
        raise UsageError(
            f"form={form!r} needs a target_error: the squared error of y to expect for one token."
        )
    if target_error is not None and not (math.isfinite(target_error) and target_error > 0):
        raise UsageError(f"target_error is {target_error}; expected a positive number.")
    if max_cost < 1:
        raise UsageError(f"max_cost is {max_cost}; expected at least 1.")


def _rounding(problem: FeedForwardProblem, layer: nn.Module, exactly: Exactly) -> float:
    """By how much float32 changes the output, relative to it."""
    rows = problem.held_out[:_AT_ONCE]
    want, got = exactly(rows), _run(problem, layer, rows)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _judge(
    problem: FeedForwardProblem, layer: nn.Module, after: Following | None
) -> tuple[float, float]:
    """Mean |y^ - y|^2 and mean |y|^2 over the held-out rows."""
    want = problem.outputs(problem.held_out)
    want = want if after is None else after(want)
    got = _run(problem, layer, problem.held_out)
    return float(((got - want) ** 2).sum(1).mean()), float((want**2).sum(1).mean())


@torch.inference_mode()
def _run(problem: FeedForwardProblem, layer: nn.Module, rows: np.ndarray) -> np.ndarray:
    """The layer as it runs, in float32, on rows x'."""
    x = torch.from_numpy(rows[:, :-1] + problem.centre).float()
    return torch.cat([layer(part) for part in x.split(_AT_ONCE)]).double().numpy()
