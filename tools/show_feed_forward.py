"""Feed-forward layers as feature maps, on trained networks of two layers that tell digits apart.

    python tools/show_feed_forward.py

trains two networks 64 -> 32 -> 10 and 16 -> 64 -> 10 from a seed, the second with a weight decay
that keeps its pre-activations below 1, as the theory of random maps needs; replaces their first
layer and GELU in every form; and holds what is measured against the theory:

    bias       below (b - a)^2 max|f''| / (8 n), and somewhere above half of it
    variance   at most what is stated, and the mean on the polynomial, over ``--draws`` layers
    E[K]       1/rho - 1
    accuracy   of least squares within half a point of the network's, and what that costs

Exits 1 where one of them fails. A check of a mean allows six standard errors: of near-normal means
a false alarm is one in 5e8. ``--json FILE`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from linexport.errors import LinexportError, UsageError
from linexport.models import data, scores, training
from linexport.models.digit_network import DigitNetwork
from linexport.models.feed_forward import bernstein, linearize_feed_forward, problem, taylor
from linexport.models.feed_forward.bernstein import SAFE_DEGREE
from linexport.models.feed_forward.power_plan import FeedForwardPlan, build, plan
from linexport.models.feed_forward.problem import FeedForwardProblem

ERRORS = 6.0
BERNSTEIN_ERROR, TAYLOR_ERROR = 0.004, 0.02
HALF_A_POINT = 0.005
_ROWS = 16


class Claims:
    """Claims that are checked, and printed as they are found."""

    def __init__(self) -> None:
        self.failed = 0
        self.found: dict[str, Any] = {}

    def check(self, name: str, true: bool, text: str, **numbers: Any) -> None:
        """One claim, with the numbers it rests on."""
        self.failed += not true
        self.found[name] = {"holds": bool(true), **numbers}
        print(f"{'ok  ' if true else 'FAIL'}  {name}: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=200, help="layers a variance is taken over")
    parser.add_argument("--steps", type=int, default=1200, help="of training, each network")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plain = training.train_digit_network(chosen.steps, seed=chosen.seed)
    small = training.train_digit_network(
        chosen.steps, seed=chosen.seed, parts=16, hidden_dim=64, decay=5.0
    )
    claims = Claims()
    print("\nThe network 64 -> 32 -> 10")
    show_least_squares(claims, plain, chosen.seed)
    show_bias(claims, plain, chosen.seed)
    show_refusals(claims, plain, chosen.seed)
    print("\nThe network 16 -> 64 -> 10, kept small")
    show_bernstein(claims, small, chosen.seed, chosen.draws)
    show_taylor(claims, small, chosen.seed, chosen.draws)
    if chosen.json:
        chosen.json.write_text(json.dumps(claims.found, indent=1))
    return int(claims.failed > 0)


def show_least_squares(claims: Claims, network: DigitNetwork, seed: int) -> None:
    """The practical default, beside the degree below it."""
    train, held_out = _pixels(network)
    before = _accuracy(network, held_out)
    # An error that any line comes within.
    for degree, target in ((2, None), (1, 1e9)):
        layer, report = linearize_feed_forward(
            network.hidden, "gelu", train, target_error=target, seed=seed
        )
        assert report.degree == degree
        after = _accuracy(nn.Sequential(layer, network.classes), held_out)
        print(report.table)
        factor = report.multiply_adds / report.multiply_adds_before
        verdict = "a loss" if factor > 1 else "a win"
        text = (
            f"accuracy {after:.2%}, before {before:.2%}; relative error "
            f"{report.relative_error:.3f}; {factor:.1f} times the multiply-adds: {verdict}"
        )
        if degree == 2:
            close = abs(after - before) <= HALF_A_POINT
            claims.check(
                "least squares", close, text, before=before, after=after, cost_factor=factor
            )
        else:
            print(f"      least squares of degree 1: {text}")


def show_bias(claims: Claims, network: DigitNetwork, seed: int) -> None:
    """Show the bias of Bernstein polynomials on the calibration data, at the exact B_n f(W x)."""
    train, _ = _pixels(network)
    given = problem.checked_problem(network.hidden, "gelu", train, seed)
    width = 2 * float(given.half.max())
    print("degree  largest bias  corrected bound  half of it, uncorrected")
    below, above = True, False
    for n in (2, 4, 8, 16, SAFE_DEGREE):
        found = bernstein.Polynomials(bernstein.coefficients(given, n), given.scaled)
        error = np.abs(found.at(given.rows) - given.outputs(given.rows)).max(0)
        bounds = np.array([bernstein.bound(given.activation, 2 * h, n) for h in given.half])
        below &= bool((error <= bounds).all())
        above |= bool((error > bounds / 2).any())
        worst = int((error / bounds).argmax())
        print(f"{n:6}  {error[worst]:12.5f}  {bounds[worst]:15.5f}  {bounds[worst] / 2:.5f}")
    text = f"below the bound for every output: {below}; above half of it somewhere: {above}"
    claims.check("Bernstein's bias", below and above, text, widest_interval=width)


def show_refusals(claims: Claims, network: DigitNetwork, seed: int) -> None:
    """Show what the forms with a proof cost here, before anything is built."""
    train, _ = _pixels(network)
    for form, target in (("bernstein", 0.5), ("bernstein", 8.0), ("taylor", 1.0)):
        try:
            linearize_feed_forward(
                network.hidden, "gelu", train, form, target_error=target, seed=seed
            )
        except UsageError as error:
            claims.check(f"{form} at {target:g} is refused", True, str(error))
        else:
            claims.check(f"{form} at {target:g} is refused", False, "it was built")


def show_bernstein(claims: Claims, network: DigitNetwork, seed: int, draws: int) -> None:
    """Mean and variance over layers with random maps, for the first rows."""
    train, held_out = _pixels(network)
    _, report = _replaced(network, "bernstein", BERNSTEIN_ERROR, seed)
    print(report.table)
    given = problem.checked_problem(network.hidden, "gelu", train, seed)
    stated = sum(power.error for power in report.powers)
    planned = plan(given, "bernstein", BERNSTEIN_ERROR, seed)
    layer = partial(_drawn, given, planned)
    _moments(claims, "Bernstein", given, planned.polynomials.at, layer, draws, stated)
    _report_accuracy(network, "bernstein", BERNSTEIN_ERROR, seed, held_out)


def show_taylor(claims: Claims, network: DigitNetwork, seed: int, draws: int) -> None:
    """Show mean and variance of the unbiased Taylor composition, and the mean of K."""
    train, held_out = _pixels(network)
    _, report = _replaced(network, "taylor", TAYLOR_ERROR, seed)
    print(report.table)
    given = problem.checked_problem(network.hidden, "gelu", train, seed)
    law, single = taylor.best(given)
    count = math.ceil(single / TAYLOR_ERROR)
    rho = 0.5
    sample = taylor.draw(taylor.Degrees("geometric", rho), count * draws, seed)
    mean = float(sample @ np.arange(len(sample))) / sample.sum()
    error = math.sqrt(1 - rho) / rho / math.sqrt(sample.sum())
    right = abs(mean - (1 / rho - 1)) < ERRORS * error < abs(mean - (1 / rho + 1))
    text = f"{mean:.4f} ± {error:.4f} at rho {rho:g}; 1/rho - 1 is {1 / rho - 1:.4f}"
    claims.check("Taylor's E[K]", right, text, mean=mean, rho=rho)
    assert report.bound is not None

    def layer(seed: int) -> Rows:
        return _drawn(given, FeedForwardPlan(*taylor.drawn(given, law, count, seed), None), seed)

    _moments(claims, "Taylor", given, given.outputs, layer, draws, report.bound)
    _report_accuracy(network, "taylor", TAYLOR_ERROR, seed, held_out)


Rows = Callable[[np.ndarray], np.ndarray]
"""From x', (rows, d + 1), to y, (rows, out)."""


def _moments(
    claims: Claims,
    name: str,
    given: FeedForwardProblem,
    mean_of: Rows,
    layer: Callable[[int], Rows],
    draws: int,
    stated: float,
) -> None:
    """The mean and |y^ - E y^|^2 over layers drawn with seeds of their own, on the first rows."""
    rows = given.rows[:_ROWS]
    want = mean_of(rows)
    sample = np.stack([layer(seed)(rows) for seed in range(draws)])
    # One number a layer: along the direction of y, and the squared distance.
    along = ((sample - want) * want).sum(2).mean(1)
    z = float(along.mean() / (along.std(ddof=1) / math.sqrt(draws)))
    claims.check(f"{name}'s mean", abs(z) < ERRORS, f"{z:+.2f} standard errors away", z=z)
    squares = ((sample - want) ** 2).sum(2)
    worst = int(squares.mean(0).argmax())
    variance = float(squares[:, worst].mean())
    error = float(squares[:, worst].std(ddof=1)) / math.sqrt(draws)
    text = f"{variance:.5f} ± {error:.5f}; at most {stated:.5f} is stated"
    holds = variance - ERRORS * error <= stated
    claims.check(f"{name}'s variance", holds, text, variance=variance, stated=stated)


def _drawn(given: FeedForwardProblem, planned: FeedForwardPlan, seed: int) -> Rows:
    """A layer with the draws of a seed, in float64."""
    layer, weight = build(given, planned, seed)
    return partial(layer.exactly, weight)


def _replaced(network: DigitNetwork, form: str, target: float, seed: int) -> Any:
    train, _ = _pixels(network)
    return linearize_feed_forward(
        network.hidden, "gelu", train, form, target_error=target, seed=seed
    )


def _report_accuracy(
    network: DigitNetwork, form: str, target: float, seed: int, held_out: torch.Tensor
) -> None:
    layer, report = _replaced(network, form, target, seed)
    before = _accuracy(network, held_out)
    after = _accuracy(nn.Sequential(layer, network.classes), held_out)
    factor = report.multiply_adds / report.multiply_adds_before
    print(
        f"      accuracy {after:.2%}, before {before:.2%}; error {report.error:.4f}, bound "
        f"{report.bound:.4f}; {factor:.0f} times the multiply-adds"
    )


def _accuracy(model: nn.Module, pixels: torch.Tensor) -> float:
    return scores.share_right(model, pixels, data.digits()[1])


def _pixels(network: DigitNetwork) -> tuple[torch.Tensor, torch.Tensor]:
    parts = network.config["features"]
    train, held_out = (data.means(d.images, parts) for d in data.digits())
    return train, held_out


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LinexportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
