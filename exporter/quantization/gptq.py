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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from linexport.quantization.block_quantisation import (
    Grid,
    Matrix,
    Quantised,
    centred,
    fit_columns,
    in_blocks,
    quantised,
    round_to_grid,
)
from linexport.system import memory

DAMPING = 0.01
"""Added to the diagonal of the second moment, relative to its mean."""

RIDGE = 0.001
"""The c of inexact inputs, relative to the mean of the diagonal: 0.0001 and 0.01 were measured to
leave 5 % more divergence."""

LONGEST = 256
"""Inputs of a block of which every value goes to its best: each changes all that follow."""

STEP = 128
"""Inputs that are corrected for each other one by one."""

TOGETHER = 256
"""Inputs that are rounded before all that come after them are corrected at once."""

CYCLES = 4
"""Times that every value goes to its best; more were measured to gain nothing."""

TRIANGLE = 256
"""Rows of a triangular matrix that are inverted at once."""

AT_ONCE, OUTPUTS = 2**21, 2**10
"""Weights, and outputs, that a thread rounds at once at most: a weight takes about 30 bytes
meanwhile, and ``TOGETHER`` inputs of so many outputs are in a core's cache."""

THREADS = 4
"""At the most: each has that much memory."""

Moment = NDArray[np.float64]
"""Sums and factors; values and scales are found with them in float32."""

Rounded = tuple[NDArray[np.uint8], Matrix, Matrix]
"""Values (K, N), scales and zero points (blocks, N). Inputs come first: work goes from one to the
next, and what all outputs have at one input lies together in memory."""


class CalibratedInputs:
    """Inputs y of some weights on calibration data, and what is computed from them once for all.

    Factors are float32: rounding them moves outputs of the chosen weights by far less than their
    own rounding does, and the damped moment's condition is bounded. A moment that has no factor in
    float32 gets one in float64.

    Args:
        moment: E[y y^T], (K, K).
        errors: E[(x - y) y^T], (K, K), with the x of the float32 model; None where y is x, or
            where all weights that read y have ``errors_of_outputs``.
        errors_of_outputs: E[W (x - y) y^T], (N, K), of weights W by their names.
    """

    def __init__(
        self,
        moment: Moment | Matrix,
        errors: Moment | None = None,
        errors_of_outputs: Mapping[str, Moment] | None = None,
    ) -> None:
        self.moment = moment
        self._errors, self._errors_of_outputs = errors, errors_of_outputs or {}
        self._factors: dict[int, Matrix] = {}

    @property
    def exact(self) -> bool:
        """True where y is the x of the float32 model."""
        return self._errors is None and not self._errors_of_outputs

    def damped(self, size: int, kind: type[np.floating] = np.float64) -> NDArray[np.floating]:
        """Return the moment with a larger diagonal, and inputs that never occur up to size."""
        damped = np.zeros((size, size), kind)
        inputs = len(self.moment)
        damped[:inputs, :inputs] = self.moment
        mean = float(np.diag(self.moment).mean()) or 1.0
        places = np.arange(size)
        damped[places, places] += DAMPING * mean + 1e-6 * (places >= inputs)
        return damped

    def factor(self, size: int) -> Matrix:
        """Return the upper Cholesky factor U of the inverse of ``damped``.

        It is the inverse of R, M = R R^T with an upper R: the lower factor of M with its rows and
        columns in reverse order, reversed again.
        """
        if size not in self._factors:
            own = _cholesky(lambda kind: np.ascontiguousarray(self.damped(size, kind)[::-1, ::-1]))
            _invert_lower(own)
            found = own.flip(0, 1).float().numpy()
            [self._factors[size]] = memory.memory_mapped([found])
        return self._factors[size]

    def target(self, name: str, matrix: Matrix) -> Matrix:
        """Return the matrix (N, K) that gives for y what ``matrix``, of this name, gives for x."""
        if name in self._errors_of_outputs:
            return matrix + self._solved(self._errors_of_outputs[name])
        return matrix if self._errors is None else matrix + matrix @ self._change

    @cached_property
    def _change(self) -> Matrix:
        """E[(x - y) y^T] (E[y y^T] + c I)^-1."""
        assert self._errors is not None
        return self._solved(self._errors)

    @cached_property
    def _ridged(self) -> torch.Tensor | None:
        """Lower factor of E[y y^T] + c I; None of inputs that are zero."""
        ridge = RIDGE * float(np.trace(self.moment)) / len(self.moment)
        if ridge == 0:
            return None

        def ridged(kind: type[np.floating]) -> NDArray[np.floating]:
            own = self.moment.astype(kind)
            own[np.diag_indices(len(own))] += ridge
            return own

        return _cholesky(ridged)

    def _solved(self, products: Moment | Matrix) -> Matrix:
        """Return products (N, K) times the inverse of E[y y^T] + c I, float32."""
        factor = self._ridged
        if factor is None:
            return np.zeros(products.shape, np.float32)
        wanted = torch.from_numpy(products).to(factor.dtype)
        return np.ascontiguousarray(torch.cholesky_solve(wanted.T, factor).T.float().numpy())


def gptq(matrix: Matrix, grid: Grid, inputs: CalibratedInputs, descends: bool = True) -> Quantised:
    """Round one input after another, correcting those to come; then each to its best.

    A block's scale is chosen when its turn comes. Inputs are taken in their own order: the better
    of that and of the order by size, for each output, left as much divergence in twice the time.

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
        inputs: of the layer.
        descends: values and scales then go to their best in turn, where blocks are not long and
            values evenly spaced.
    """
    padded = grid.blocks(matrix.shape[1]) * grid.block
    factor = inputs.factor(padded)
    outputs = min(OUTPUTS, max(1, AT_ONCE // padded))
    parts = np.array_split(matrix, -(-len(matrix) // outputs))
    found = _in_threads(partial(_in_turn, grid=grid, factor=factor), parts)
    if descends and grid.block <= LONGEST and not grid.floating:
        single = inputs.damped(padded, np.float32)
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
    cost = (1 / np.diag(factor) ** 2).astype(np.float32)
    scales, zeros = np.empty((2, len(weights) // grid.block, len(matrix)), np.float32)
    values = np.empty(weights.shape, np.uint8)
    reach = grid.block * max(1, TOGETHER // grid.block)
    errors = np.empty((min(reach, len(weights)), len(matrix)), np.float32)
    for begin in range(0, len(weights), reach):
        stop = min(begin + reach, len(weights))
        for start in range(begin, stop, grid.block):
            inside = slice(start, start + grid.block)
            # The corrections of all earlier blocks are in it now.
            scale, zero = fit_columns(weights[inside], grid, cost[inside])
            scales[start // grid.block], zeros[start // grid.block] = scale, zero
            for first in range(start, inside.stop, STEP):
                last = min(first + STEP, inside.stop)
                own = errors[first - begin : last - begin]
                _round_rows(weights, values, own, first, scale, zero, grid, factor)
                weights[last:stop] -= factor[first:last, last:stop].T @ own
        weights[stop:] -= factor[begin:stop, stop:].T @ errors[: stop - begin]
    return values, scales, zeros


def _round_rows(
    weights: Matrix,
    values: NDArray[np.uint8],
    errors: Matrix,
    first: int,
    scale: Matrix,
    zero: Matrix,
    grid: Grid,
    factor: Matrix,
) -> None:
    """Round as many inputs as there are ``errors``, which get theirs, and correct these alone.

    Args:
        weights: (K, N), changed.
        values: (K, N), written.
        errors: of these inputs, relative to the diagonal of the factor; written.
        first: of the inputs.
        scale: of their block, (N,).
        zero: of their block, (N,).
        grid: of the values.
        factor: (K, K), upper.
    """
    last = first + len(errors)
    rounded, changes = np.empty(len(scale), np.float32), np.empty_like(errors)
    for row, error in enumerate(errors, first):
        values[row] = found = round_to_grid(weights[row], scale, zero, grid)
        np.multiply(centred(found, zero, grid), scale, out=rounded)
        np.subtract(weights[row], rounded, out=error)
        error /= factor[row, row]
        change = changes[: last - row - 1]
        np.multiply(factor[row, row + 1 : last, None], error, out=change)
        weights[row + 1 : last] -= change


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


def _cholesky(matrix: Callable[[type[np.floating]], NDArray[np.floating]]) -> torch.Tensor:
    """Lower Cholesky factor of the matrix that is made, float32 where there is one."""
    single, failed = torch.linalg.cholesky_ex(torch.from_numpy(matrix(np.float32)))
    return torch.linalg.cholesky(torch.from_numpy(matrix(np.float64))) if failed else single


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
