"""Values of least error on calibration data, for weights on a grid.

    tr(D M D^T),   D = Q - W (N, K),   M = E[x x^T] (K, K)

is the mean squared error of a layer's outputs. ``gptq`` rounds one input at a time and lets the
inputs that are not rounded yet make up for its error. Then each value in turn, and each scale, goes
to its best with all others as they are:

    q_k     <-  the grid's value nearest to  w_k + d_k - (D M)_k / M_kk
    s_b     <-  s_b - (D M)_b . c_b / (c_b M_bb c_b^T),   c = q - z in block b

Rows do not depend on each other. Sources: Frantar et al. 2022 (arXiv 2210.17323), algorithm 1, for
the first; Behdin et al. 2023 (arXiv 2309.01885) for values in turn. Scales and zero points of a
block are those of least error among some, weighted by what an error of each input costs: 1 / U_kk^2
for the Cholesky factor U of the inverse of M.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from linexport.quantise.block_quantisation import (
    Grid,
    Matrix,
    Quantised,
    fit,
    in_blocks,
    quantised,
    round_to_grid,
)

DAMPING = 0.01
"""Added to the diagonal of the second moment, relative to its mean."""

CYCLES = 4
"""Times that every value goes to its best; more were measured to gain nothing."""

AT_ONCE = 2**21
"""Weights that are rounded at once: each takes about 50 bytes meanwhile."""

Moment = NDArray[np.float64]
Rounded = tuple[NDArray[np.uint8], Matrix, Matrix]
"""Values, scales and zero points."""


@dataclass(frozen=True)
class _Order:
    """An order to round inputs in, and the upper Cholesky factor of the inverse moment in it."""

    places: NDArray[np.int64]
    factor: Moment

    @property
    def is_own(self) -> bool:
        """True for the order in which inputs are stored."""
        return bool((self.places[1:] > self.places[:-1]).all())


def gptq(matrix: Matrix, grid: Grid, second_moment: Moment | Matrix) -> Quantised:
    """Round one input after another, correcting those to come; then each to its best.

    Inputs are taken in their own order, with a scale for each block when its turn comes, and in
    the order of their size, with scales chosen before; of both each output has what errs less.

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
        second_moment: E[x x^T] of the layer's inputs on calibration data, (K, K).
    """
    padded = grid.blocks(matrix.shape[1]) * grid.block
    damped = _damped(second_moment, padded)
    by_size = np.argsort(-np.diag(damped), kind="stable")
    count = min(len(matrix), max(1, matrix.size // AT_ONCE))
    parts = np.array_split(matrix, count)
    rounded = []
    for places in (np.arange(padded), by_size):
        # One factor at a time: they are the largest matrices there are.
        order = _Order(places, _inverse_factor(damped[np.ix_(places, places)]))
        rounded.append([_in_turn(part, grid, order) for part in parts])
        del order
    own_order, size_order = rounded
    found = [
        _rows(part, first, second, grid, damped)
        for part, first, second in zip(parts, own_order, size_order, strict=True)
    ]
    values, scales, zeros = (np.concatenate(own) for own in zip(*found, strict=True))
    return quantised(grid, matrix.shape[1], values, scales, zeros)


def _rows(
    matrix: Matrix, own_order: Rounded, by_size: Rounded, grid: Grid, damped: Moment
) -> Rounded:
    """Return values (N, blocks, block), scales and zero points of some outputs."""
    first, second = (_Descent(matrix, grid, damped, *rounded) for rounded in (own_order, by_size))
    first.take(second, second.errors() < first.errors())
    for _ in range(CYCLES):
        first.cycle()
    values = first.values.reshape(len(matrix), -1, grid.block)
    return values, first.scales.astype(np.float32), first.zeros


def _in_turn(matrix: Matrix, grid: Grid, order: _Order) -> Rounded:
    """Round inputs in this order; returns values, scales and zero points."""
    rows, places, factor = in_blocks(matrix, grid), order.places, order.factor
    weights = rows.reshape(len(rows), -1)[:, places].astype(np.float64)
    # What an error of an input costs when those after it have made up for it.
    costs = np.empty(len(places), np.float32)
    costs[places] = 1 / np.diag(factor) ** 2
    cost = costs.reshape(-1, grid.block)
    own = order.is_own
    scales, zeros = np.empty((2, *rows.shape[:2]), np.float32)
    if not own:
        scales, zeros = fit(rows, grid, cost)
    values = np.zeros(weights.shape, np.uint8)
    for start in range(0, len(places), grid.block):
        end = start + grid.block
        if own:
            # The corrections of all earlier blocks are in it now.
            index = start // grid.block
            block = np.ascontiguousarray(weights[:, start:end], np.float32)[:, None]
            fitted = fit(block, grid, cost[index])
            scales[:, index], zeros[:, index] = (found[:, 0] for found in fitted)
        errors = np.zeros((len(rows), grid.block))
        for offset, column in enumerate(range(start, end)):
            index = places[column] // grid.block
            scale, zero = scales[:, index], zeros[:, index]
            found = round_to_grid(weights[:, column], scale, zero, grid.top)
            values[:, places[column]] = found
            error = (weights[:, column] - (found - zero) * scale) / factor[column, column]
            errors[:, offset] = error
            weights[:, column:end] -= np.outer(error, factor[column, column:end])
        weights[:, end:] -= errors @ factor[start:end, end:]
    return values, scales, zeros


class _Descent:
    """Values and scales of some outputs, each of which can go to its best.

    Attributes:
        values: q (N, K); scales and zeros: s and z (N, blocks).
    """

    def __init__(
        self,
        matrix: Matrix,
        grid: Grid,
        damped: Moment,
        values: NDArray[np.uint8],
        scales: Matrix,
        zeros: Matrix,
    ) -> None:
        self.grid, self.moment = grid, damped
        self.values, self.scales, self.zeros = values, scales.astype(np.float64), zeros
        stored = in_blocks(matrix, grid).reshape(values.shape)
        centred = values - np.repeat(zeros, grid.block, 1)
        self._difference = centred * np.repeat(self.scales, grid.block, 1) - stored
        self._gradient = self._difference @ damped

    def errors(self) -> NDArray[np.float64]:
        """Mean squared error of each output, (N,)."""
        return np.asarray((self._gradient * self._difference).sum(-1))

    def take(self, other: _Descent, rows: NDArray[np.bool_]) -> None:
        """Have these outputs as the other one has them."""
        for name in ("values", "scales", "zeros", "_difference", "_gradient"):
            getattr(self, name)[rows] = getattr(other, name)[rows]

    def cycle(self) -> None:
        """Let every scale and every value go to its best, block by block."""
        size = self.grid.block
        for block in range(self.scales.shape[1]):
            inside = slice(block * size, (block + 1) * size)
            before = self._difference[:, inside].copy()
            gradient = self._gradient[:, inside].copy()
            own = self.moment[inside, inside]
            self._scale(block, inside, own, gradient)
            self._values(block, inside, own, gradient)
            change = self._difference[:, inside] - before
            self._gradient += change @ self.moment[inside]

    def _scale(self, block: int, inside: slice, own: Moment, gradient: Moment) -> None:
        centred = self.values[:, inside] - self.zeros[:, block, None].astype(np.float64)
        curvature = ((centred @ own) * centred).sum(-1)
        step = -(gradient * centred).sum(-1) / np.where(curvature > 0, curvature, np.inf)
        found = self.scales[:, block] + step
        # A block of zeros, and one whose errors leave nothing of its weights, stay as they are.
        step[~(np.abs(found) > np.finfo(np.float32).tiny)] = 0
        self.scales[:, block] += step
        change = centred * step[:, None]
        self._difference[:, inside] += change
        gradient += change @ own

    def _values(self, block: int, inside: slice, own: Moment, gradient: Moment) -> None:
        scale, zero = self.scales[:, block], self.zeros[:, block]
        difference, values = self._difference[:, inside], self.values[:, inside]
        for k in range(self.grid.block):
            old = values[:, k].astype(np.float64)
            # w + d is (q - z) s of the value that is there.
            best = (old - zero) * scale - gradient[:, k] / own[k, k]
            values[:, k] = round_to_grid(best, scale, zero, self.grid.top)
            change = (values[:, k] - old) * scale
            difference[:, k] += change
            gradient += np.outer(change, own[k])


def _damped(second_moment: Moment | Matrix, size: int) -> Moment:
    """Return the second moment with a larger diagonal, and inputs that never occur up to size."""
    inputs = len(second_moment)
    damped = np.eye(size) * 1e-6
    damped[:inputs, :inputs] = second_moment
    mean = float(np.diag(second_moment).mean()) or 1.0
    damped[np.arange(size), np.arange(size)] += DAMPING * mean
    return damped


def _inverse_factor(damped: Moment) -> Moment:
    """Upper Cholesky factor of the inverse, in the memory of the argument."""
    own = torch.from_numpy(damped)
    torch.linalg.cholesky(own, out=own)
    inverse = torch.cholesky_inverse(own)
    torch.linalg.cholesky(inverse, upper=True, out=own)
    return damped
