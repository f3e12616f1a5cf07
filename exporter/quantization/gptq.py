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

Weights before it make a layer's inputs y differ from the x of the float32 model. What is rounded is

    W' = W + W E[(x - y) y^T] (E[y y^T] + c I)^-1

whose products W' y are nearest to W x; c keeps it near W. Source: Li et al. 2025 (arXiv
2504.02692), the objective with both inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from linexport.quantization.block_quantisation import (
    Grid,
    Matrix,
    Quantised,
    centred,
    fit,
    in_blocks,
    quantised,
    round_to_grid,
)

DAMPING = 0.01
"""Added to the diagonal of the second moment, relative to its mean."""

RIDGE = 0.001
"""The c of inexact inputs, relative to the mean of the diagonal: 0.0001 and 0.01 were measured to
leave 5 % more divergence."""

LONGEST = 256
"""Inputs of a block of which every value goes to its best: each changes all that follow."""

STEP = 128
"""Inputs that are rounded before those after them are corrected at once."""

CYCLES = 4
"""Times that every value goes to its best; more were measured to gain nothing."""

TRIANGLE = 256
"""Rows of a triangular matrix that are inverted at once."""

AT_ONCE = 2**21
"""Weights that a thread rounds at once: each takes about 30 bytes meanwhile."""

THREADS = 4
"""At the most: each has that much memory."""

Moment = NDArray[np.float64]
"""Sums and factors; values and scales are found with them in float32."""

Rounded = tuple[NDArray[np.uint8], Matrix, Matrix]
"""Values (K, N), scales and zero points (blocks, N). Inputs come first: work goes from one to the
next, and what all outputs have at one input lies together in memory."""


def gptq(
    matrix: Matrix, grid: Grid, second_moment: Moment | Matrix, descends: bool = True
) -> Quantised:
    """Round one input after another, correcting those to come; then each to its best.

    A block's scale is chosen when its turn comes. Inputs are taken in their own order: the better
    of that and of the order by size, for each output, left as much divergence in twice the time.

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
        second_moment: E[x x^T] of the layer's inputs on calibration data, (K, K).
        descends: values and scales then go to their best in turn, where blocks are not long and
            values evenly spaced.
    """
    padded = grid.blocks(matrix.shape[1]) * grid.block
    moment = _damped(second_moment, padded)
    count = min(len(matrix), max(1, matrix.size // AT_ONCE))
    parts = np.array_split(matrix, count)
    found = _in_threads(partial(_in_turn, grid=grid, factor=_inverse_factor(moment)), parts)
    if descends and grid.block <= LONGEST and not grid.floating:
        single = moment.astype(np.float32)
        found = _in_threads(partial(_descended, grid=grid, moment=single), parts, found)
    values, scales, zeros = (np.concatenate(own, 1) for own in zip(*found, strict=True))
    stored = np.ascontiguousarray(values.T).reshape(len(matrix), -1, grid.block)
    scales, zeros = (np.ascontiguousarray(x.T) for x in (scales, zeros))
    return quantised(grid, matrix.shape[1], stored, scales, zeros)


def _in_threads(function: Callable[..., Rounded], *parts: Sequence[object]) -> list[Rounded]:
    """Map parts in threads; their products take one each, or threads would wait for each other."""
    count = min(THREADS, os.cpu_count() or 1, len(parts[0]))
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, *parts))


def _descended(matrix: Matrix, rounded: Rounded, grid: Grid, moment: Matrix) -> Rounded:
    """Return the values and scales with each at its best."""
    own = _Descent(matrix, grid, moment, *rounded)
    for _ in range(CYCLES):
        own.cycle()
    return own.values, own.scales, own.zeros


def _inputs_first(matrix: Matrix, grid: Grid) -> Matrix:
    """(N, K) as (K, N), the last block filled with zeros."""
    rows = in_blocks(matrix, grid)
    return np.ascontiguousarray(rows.reshape(len(rows), -1).T)


def _in_turn(matrix: Matrix, grid: Grid, factor: Matrix) -> Rounded:
    """Round inputs in their order; ``factor``: upper Cholesky factor of the inverse moment."""
    weights = _inputs_first(matrix, grid)
    # What an error of an input costs when those after it have made up for it.
    cost = (1 / np.diag(factor) ** 2).reshape(-1, grid.block)
    scales, zeros = np.empty((2, len(cost), len(matrix)), np.float32)
    values = np.zeros(weights.shape, np.uint8)
    errors = np.empty((min(grid.block, STEP), len(matrix)), np.float32)
    for index, start in enumerate(range(0, len(weights), grid.block)):
        end = start + grid.block
        # The corrections of all earlier blocks are in it now.
        block = np.ascontiguousarray(weights[start:end].T)[:, None]
        scale, zero = (found[:, 0] for found in fit(block, grid, cost[index]))
        scales[index], zeros[index] = scale, zero
        for first in range(start, end, STEP):
            last = min(first + STEP, end)
            for offset, row in enumerate(range(first, last)):
                values[row] = found = round_to_grid(weights[row], scale, zero, grid)
                rounded = centred(found, zero, grid) * scale
                errors[offset] = (weights[row] - rounded) / factor[row, row]
                weights[row:last] -= np.outer(factor[row, row:last], errors[offset])
            weights[last:] -= factor[first:last, last:].T @ errors[: last - first]
    return values, scales, zeros


class _Descent:
    """Values and scales of some outputs, each of which can go to its best.

    Attributes:
        values: q (K, N); scales and zeros: s and z (blocks, N).
    """

    def __init__(
        self,
        matrix: Matrix,
        grid: Grid,
        moment: Matrix,
        values: NDArray[np.uint8],
        scales: Matrix,
        zeros: Matrix,
    ) -> None:
        self.grid, self.moment = grid, moment
        self.values, self.scales, self.zeros = values, scales, zeros
        numbers = values - np.repeat(zeros, grid.block, 0).astype(np.float32)
        stored = _inputs_first(matrix, grid)
        self._difference = numbers * np.repeat(self.scales, grid.block, 0) - stored

    def cycle(self) -> None:
        """Let every scale and every value go to its best, block by block."""
        size = self.grid.block
        for block in range(len(self.scales)):
            inside = slice(block * size, (block + 1) * size)
            gradient = self.moment[inside] @ self._difference
            own = self.moment[inside, inside]
            self._scale(block, inside, own, gradient)
            self._values(block, inside, own, gradient)

    def _scale(self, block: int, inside: slice, own: Matrix, gradient: Matrix) -> None:
        numbers = self.values[inside] - self.zeros[block].astype(np.float32)
        curvature = ((own @ numbers) * numbers).sum(0)
        step = -(gradient * numbers).sum(0) / np.where(curvature > 0, curvature, np.inf)
        found = self.grid.as_stored(self.scales[block] + step)
        step = found - self.scales[block]
        # A block of zeros, and one whose errors leave nothing of its weights, stay as they are.
        step[~(np.abs(found) > np.finfo(np.float32).tiny)] = 0
        self.scales[block] += step
        change = numbers * step
        self._difference[inside] += change
        gradient += own @ change

    def _values(self, block: int, inside: slice, own: Matrix, gradient: Matrix) -> None:
        scale, zero = self.scales[block], self.zeros[block]
        difference, values = self._difference[inside], self.values[inside]
        for k in range(self.grid.block):
            old = values[k].astype(np.float32)
            # w + d is (q - z) s of the value that is there.
            best = (old - zero) * scale - gradient[k] / own[k, k]
            values[k] = round_to_grid(best, scale, zero, self.grid)
            change = (values[k] - old) * scale
            difference[k] += change
            # Values before k had their turn.
            gradient[k + 1 :] += np.outer(own[k, k + 1 :], change)


def _damped(second_moment: Moment | Matrix, size: int) -> Moment:
    """Return the second moment with a larger diagonal, and inputs that never occur up to size."""
    inputs = len(second_moment)
    damped = np.eye(size) * 1e-6
    damped[:inputs, :inputs] = second_moment
    mean = float(np.diag(second_moment).mean()) or 1.0
    damped[np.arange(size), np.arange(size)] += DAMPING * mean
    return damped


def _inverse_factor(damped: Moment) -> Matrix:
    """Upper Cholesky factor U of the inverse, float32: the inverse of R, M = R R^T with an upper R.

    R is the lower factor of M with its rows and columns in reverse order, reversed again.
    """
    own = torch.from_numpy(damped).flip(0, 1)
    torch.linalg.cholesky(own, out=own)
    _invert_lower(own)
    return own.flip(0, 1).float().numpy()


def _invert_lower(factor: torch.Tensor) -> None:
    """Invert a lower triangular matrix in its place, by halves."""
    size = len(factor)
    if size <= TRIANGLE:
        one = torch.eye(size, dtype=factor.dtype)
        factor.copy_(torch.linalg.solve_triangular(factor, one, upper=False))
        return
    half = size // 2
    first, last, below = factor[:half, :half], factor[half:, half:], factor[half:, :half]
    _invert_lower(first)
    _invert_lower(last)
    below.copy_(-last @ (below @ first))


def for_inexact_inputs(matrix: Matrix, second_moment: Moment, errors: Moment) -> Matrix:
    """Return the matrix (N, K) that gives for inexact inputs y what ``matrix`` gives for x.

    Args:
        matrix: (N, K).
        second_moment: E[y y^T], (K, K).
        errors: E[(x - y) y^T], (K, K).
    """
    ridge = RIDGE * float(np.trace(second_moment)) / len(second_moment)
    if ridge == 0:
        return matrix
    ridged = torch.from_numpy(second_moment + ridge * np.eye(len(second_moment)))
    factor = torch.linalg.cholesky(ridged)
    # Of fewer outputs than inputs, their own change is solved for.
    few = len(matrix) < len(errors)
    wanted = torch.from_numpy(matrix @ errors if few else errors)
    change = torch.cholesky_solve(wanted.T, factor).T.numpy()
    return (matrix + (change if few else matrix @ change)).astype(np.float32)
