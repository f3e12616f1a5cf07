"""Block-wise affine quantisation of a weight matrix.

    W (N, K) ~ (q - z) s,   q in 0 .. 2^bits - 1

with one scale s and one integer zero point z for each block of ``size`` consecutive inputs of one
output. The last block is padded with zeros where the block size does not divide K.

``nearest`` rounds every weight. ``gptq`` rounds one input at a time and lets the inputs that are
not rounded yet make up for the error, weighted by how the inputs vary together on real data.
Sources: the layout is that of ONNX Runtime's MatMulNBits; GPTQ is Frantar et al. 2022 (arXiv
2210.17323), algorithm 1. Scales and zero points are those of least error among some, weighted by
what an error of each input costs: 1 / U_kk^2 for the Cholesky factor U of the inverse of the second
moment.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHRINKS = np.linspace(0.64, 1.0, 10, dtype=np.float32)
"""Parts of a block's range that are tried: clipping an outlier can serve all others."""

SHIFTS = (0, -1, 1)
FEW = 15
"""Zero points beside the nearest are tried where there are so few values: each is a large step."""

AT_ONCE = 2**20
"""Weights that are fitted at once: what is tried is as large, several times over."""

DAMPING = 0.01
"""Added to the diagonal of the second moment, relative to its mean."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    """The numbers a weight may become.

    Attributes:
        bits: of one weight, 4 or 8.
        block: weights that share a scale and a zero point, a power of two from 16.
    """

    bits: int
    block: int

    @property
    def top(self) -> int:
        """Largest value of q."""
        return int(2**self.bits - 1)

    def blocks(self, inputs: int) -> int:
        """Number of blocks of one output."""
        return -(-inputs // self.block)

    def row_bytes(self, inputs: int) -> int:
        """Size of one output: values, float32 scales and zero points."""
        count = self.blocks(inputs)
        return count * (self.block * self.bits // 8 + 4) + -(-count * self.bits // 8)

    def bits_per_weight(self, inputs: int) -> float:
        """Storage of one weight with its share of a float32 scale and a zero point."""
        count = self.blocks(inputs)
        return (count * (self.block * self.bits + 32 + self.bits)) / inputs


@dataclass(frozen=True)
class Quantised:
    """A matrix (N, K) on a grid.

    Attributes:
        grid: the grid.
        inputs: K.
        values: q, uint8 (N, blocks, block).
        scales: s, float32 (N, blocks).
        zeros: z, uint8 (N, blocks).
    """

    grid: Grid
    inputs: int
    values: NDArray[np.uint8]
    scales: Matrix
    zeros: NDArray[np.uint8]

    def matrix(self) -> Matrix:
        """The matrix that the runtime computes with, float32 (N, K)."""
        centred = self.values.astype(np.float32) - self.zeros[..., None]
        return np.ascontiguousarray(
            (centred * self.scales[..., None]).reshape(len(self.values), -1)[:, : self.inputs]
        )

    def packed(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Values (N, blocks, bytes) and zero points (N, bytes), lower half of a byte first."""
        return _pack(self.values, self.grid.bits), _pack(self.zeros, self.grid.bits)


def nearest(matrix: Matrix, grid: Grid) -> Quantised:
    """Round every weight to the grid of least squared error.

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
    """
    rows = _in_blocks(matrix, grid)
    scales, zeros = _fit(rows, grid.top)
    values = _round(rows, scales[..., None], zeros[..., None], grid.top)
    return _quantised(grid, matrix.shape[1], values, scales, zeros)


def gptq(matrix: Matrix, grid: Grid, second_moment: NDArray[np.float64]) -> Quantised:
    """Round one input after another, correcting those to come.

    Inputs are taken in their own order, with a scale for each block when its turn comes, and in
    the order of their size, with scales chosen before. What errs less on the data is returned.

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
        second_moment: E[x x^T] of the layer's inputs on calibration data, (K, K).
    """
    padded = grid.blocks(matrix.shape[1]) * grid.block
    damped = _damped(second_moment, padded)
    own = np.arange(padded)
    by_size = np.argsort(-np.diag(damped), kind="stable")
    tries = [_in_turn(matrix, grid, damped, order) for order in (own, by_size)]
    return min(tries, key=lambda found: _error(found, matrix, second_moment))


def _error(found: Quantised, matrix: Matrix, second_moment: NDArray[np.float64]) -> float:
    """Mean squared error of the layer's outputs, summed: tr(D M D^T) for errors D."""
    wrong = (found.matrix() - matrix).astype(np.float64)
    return float(((wrong @ second_moment) * wrong).sum())


def _in_turn(
    matrix: Matrix, grid: Grid, damped: NDArray[np.float64], order: NDArray[np.int64]
) -> Quantised:
    """Round inputs in this order."""
    rows = _in_blocks(matrix, grid)
    factor = _inverse_factor(damped[np.ix_(order, order)])
    weights = rows.reshape(len(rows), -1)[:, order].astype(np.float64)
    # What an error of an input costs when those after it have made up for it.
    costs = np.empty(len(order), np.float32)
    costs[order] = 1 / np.diag(factor) ** 2
    cost = costs.reshape(-1, grid.block)
    in_order = bool((order[1:] > order[:-1]).all())
    scales, zeros = np.empty((2, *rows.shape[:2]), np.float32)
    if not in_order:
        scales, zeros = _fit(rows, grid.top, cost)
    values = np.zeros(weights.shape, np.uint8)
    for start in range(0, len(order), grid.block):
        end = start + grid.block
        if in_order:
            # The corrections of all earlier blocks are in it now.
            index = start // grid.block
            block = np.ascontiguousarray(weights[:, start:end], np.float32)[:, None]
            own = _fit(block, grid.top, cost[index])
            scales[:, index], zeros[:, index] = (found[:, 0] for found in own)
        errors = np.zeros((len(rows), grid.block))
        for offset, column in enumerate(range(start, end)):
            index = order[column] // grid.block
            scale, zero = scales[:, index], zeros[:, index]
            found = _round(weights[:, column], scale, zero, grid.top)
            values[:, order[column]] = found
            error = (weights[:, column] - (found - zero) * scale) / factor[column, column]
            errors[:, offset] = error
            weights[:, column:end] -= np.outer(error, factor[column, column:end])
        weights[:, end:] -= errors @ factor[start:end, end:]
    return _quantised(grid, matrix.shape[1], values.reshape(rows.shape), scales, zeros)


def _quantised(
    grid: Grid, inputs: int, values: NDArray[np.uint8], scales: Matrix, zeros: Matrix
) -> Quantised:
    return Quantised(grid, inputs, values, scales, zeros.astype(np.uint8))


def _in_blocks(matrix: Matrix, grid: Grid) -> Matrix:
    """(N, K) as (N, blocks, block), the last block filled with zeros."""
    outputs, inputs = matrix.shape
    count = grid.blocks(inputs)
    padded = np.pad(matrix, ((0, 0), (0, count * grid.block - inputs)))
    return padded.reshape(outputs, count, grid.block)


def _fit(rows: Matrix, top: int, cost: Matrix | None = None) -> tuple[Matrix, Matrix]:
    """Scale and zero point of least squared error for each block, (N, blocks) each.

    Args:
        rows: (N, blocks, block).
        top: largest value of q.
        cost: of a squared error at each place, (blocks, block) or (block,); None: all alike.
    """
    parts = max(1, rows.size // AT_ONCE)
    found = [_fit_part(part, top, cost) for part in np.array_split(rows, parts) if len(part)]
    scales, zeros = (np.concatenate(own) for own in zip(*found, strict=True))
    return scales, zeros


def _fit_part(rows: Matrix, top: int, cost: Matrix | None) -> tuple[Matrix, Matrix]:
    low, high = np.minimum(rows.min(-1), 0), np.maximum(rows.max(-1), 0)
    best = np.full(low.shape, np.inf, np.float32)
    scales, zeros = np.ones_like(low), np.zeros_like(low)
    shifts = SHIFTS if top <= FEW else (0,)
    for shrink, shift in itertools.product(SHRINKS, shifts):
        # A block of zeros has no range; any scale represents it.
        scale = np.maximum((high - low) * shrink / top, np.float32(1e-30))
        zero = np.clip(np.rint(-low * shrink / scale) + shift, 0, top).astype(np.float32)
        values = _round(rows, scale[..., None], zero[..., None], top)
        squares = ((values - zero[..., None]) * scale[..., None] - rows) ** 2
        error = (squares if cost is None else squares * cost).sum(-1)
        better = error < best
        best[better], scales[better], zeros[better] = error[better], scale[better], zero[better]
    return scales, zeros


def _round(rows: NDArray, scale: NDArray, zero: NDArray, top: int) -> NDArray[np.uint8]:
    return np.clip(np.rint(rows / scale) + zero, 0, top).astype(np.uint8)


def _damped(second_moment: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the second moment with a larger diagonal, and inputs that never occur up to size."""
    inputs = len(second_moment)
    damped = np.eye(size) * 1e-6
    damped[:inputs, :inputs] = second_moment
    mean = float(np.diag(second_moment).mean()) or 1.0
    damped[np.arange(size), np.arange(size)] += DAMPING * mean
    return damped


def _inverse_factor(damped: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper Cholesky factor of the inverse."""
    inverse = np.linalg.inv(damped)
    return np.ascontiguousarray(np.linalg.cholesky((inverse + inverse.T) / 2).T)


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Two values of four bits in a byte, along the last axis; a half that is left over is 0."""
    if bits == 8:
        return values
    even = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)])
    return (even[..., 0::2] | (even[..., 1::2] << 4)).astype(np.uint8)
