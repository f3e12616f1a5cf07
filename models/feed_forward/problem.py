"""Checked inputs of a linearisation of y = f(W x + b), and the rows held out of the fit.

The bias is one more component: x' = [x - centre, 1] and w_i' = [w_i, b_i + w_i . centre], so that
t_i = w_i' . x'. On the interval [a_i, b_i] of t_i the scaled variable

    u_i = (t_i - middle_i) / half_i = v_i . x'        in [-1, 1]

is an inner product with x' as well. Everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward.activations import Activation, find_activation

HELD_OUT = 0.25
"""Share of the calibration rows that nothing is fitted to."""

MARGIN = 0.1
"""By which intervals are wider than the calibration data, as a share of half their width."""

_FEWEST_ROWS = 8
# Below float32's resolution of t an interval is a point.
_DEGENERATE = 1e-6
_LISTED = 4


@dataclass(frozen=True)
class FeedForwardProblem:
    """Checked inputs.

    Attributes:
        activation: f.
        rows: x' of the calibration data, (n, d + 1).
        held_out: x' of the rest of it, (h, d + 1).
        centre: mean of x, (d,), exact in float32.
        vectors: w_i', (out, d + 1).
        middle: of the interval of each t_i, (out,).
        half: half its width, (out,).
    """

    activation: Activation
    rows: Array
    held_out: Array
    centre: Array
    vectors: Array
    middle: Array
    half: Array

    @property
    def scaled(self) -> Array:
        """v_i, (out, d + 1)."""
        shifted = self.vectors.copy()
        shifted[:, -1] -= self.middle
        return shifted / self.half[:, None]

    @property
    def outside(self) -> float:
        """Share of the held-out t_i that lie outside their interval."""
        return float((np.abs(self.held_out @ self.scaled.T) > 1).mean())

    def outputs(self, rows: Array) -> Array:
        """f(t_i) of rows x', (n, out)."""
        return self.activation(rows @ self.vectors.T)


def checked_problem(
    linear: nn.Linear, activation: str | nn.Module, calibration: Tensor, seed: int
) -> FeedForwardProblem:
    """Check what is given, and set some of the calibration data aside.

    Raises:
        UsageError: names what does not fit, or is too little, and what to do.
    """
    if not isinstance(linear, nn.Linear):
        raise UsageError(f"Only an nn.Linear can be linearised; found {type(linear).__name__}.")
    found = find_activation(activation)
    x = _rows(calibration, linear.in_features)
    weight, bias = _weights(linear)
    order = np.random.default_rng(seed).permutation(len(x))
    aside = round(HELD_OUT * len(x))
    fitted, held_out = x[order[aside:]], x[order[:aside]]
    centre = fitted.mean(0).astype(np.float32).astype(np.float64)
    vectors = np.concatenate([weight, (bias + weight @ centre)[:, None]], axis=1)
    rows, judged = (
        np.pad(part - centre, ((0, 0), (0, 1)), constant_values=1.0) for part in (fitted, held_out)
    )
    t = rows @ vectors.T
    lowest, highest = t.min(0), t.max(0)
    _spread(lowest, highest)
    half = (highest - lowest) / 2
    return FeedForwardProblem(
        found, rows, judged, centre, vectors, (lowest + highest) / 2, half * (1 + MARGIN)
    )


def _rows(calibration: Tensor, width: int) -> Array:
    """(n, width) of (..., width)."""
    if not isinstance(calibration, Tensor) or not calibration.is_floating_point():
        kind = getattr(calibration, "dtype", type(calibration).__name__)
        raise UsageError(f"The calibration data are {kind}; expected a tensor of floats.")
    if calibration.dim() < 2 or calibration.shape[-1] != width:
        raise UsageError(
            f"The calibration data have shape {tuple(calibration.shape)}; expected (..., {width}), "
            "inputs of the layer. Record them from the model on real data."
        )
    x = calibration.detach().cpu().double().reshape(-1, width).numpy()
    if len(x) < _FEWEST_ROWS:
        raise UsageError(f"{len(x)} rows of calibration data; expected at least {_FEWEST_ROWS}.")
    if not np.isfinite(x).all():
        raise UsageError("The calibration data have NaN or infinite entries. Drop those rows.")
    if (x == x[0]).all():
        raise UsageError(
            f"All {len(x)} rows of the calibration data are the same. Record inputs of the layer "
            "on varied data."
        )
    return x


def _weights(linear: nn.Linear) -> tuple[Array, Array]:
    weight = linear.weight.detach().cpu().double().numpy()
    given = linear.bias
    bias = np.zeros(len(weight)) if given is None else given.detach().cpu().double().numpy()
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise UsageError("The layer has NaN or infinite weights.")
    return weight, bias


def _spread(lowest: Array, highest: Array) -> None:
    """Refuse intervals that are points."""
    size = np.maximum(np.abs(lowest), np.abs(highest))
    points = np.flatnonzero(highest - lowest <= _DEGENERATE * size)
    if len(points):
        named = ", ".join(str(i) for i in points[:_LISTED])
        more = " and others" if len(points) > _LISTED else ""
        raise UsageError(
            f"The intervals of {len(points)} of {len(lowest)} outputs degenerate: over the "
            f"calibration data w.x + b does not vary at {named}{more}. Give more varied data, or "
            "drop outputs whose weights are zero."
        )
