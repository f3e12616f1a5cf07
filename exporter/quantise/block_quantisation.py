"""Block-wise affine quantisation of a weight matrix.

    W (N, K) ~ (q - z) s,   q in 0 .. 2^bits - 1

with one scale s and one integer zero point z for each block of ``size`` consecutive inputs of one
output. The last block is padded with zeros where the block size does not divide K.

``nearest`` rounds every weight. ``gptq`` rounds one input at a time and lets the inputs that are
not rounded yet make up for the error, weighted by how the inputs vary together on real data.
Sources: the layout is that of ONNX Runtime's MatMulNBits; GPTQ is Frantar et al. 2022 (arXiv
2210.17323), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHRINKS = np.linspace(0.6, 1.0, 20, dtype=np.float32)
"""Parts of a block's range that are tried: clipping an outlier can serve all others."""

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

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
        second_moment: E[x x^T] of the layer's inputs on calibration data, (K, K).
    """
    rows, inputs = _in_blocks(matrix, grid), matrix.shape[1]
    count, padded = rows.shape[1], rows.shape[1] * grid.block
    factor = _inverse_factor(second_moment, padded)
    weights = rows.reshape(len(rows), padded).astype(np.float64)
    values = np.zeros((len(rows), padded), np.uint8)
    scales = np.zeros((len(rows), count), np.float32)
    zeros = np.zeros((len(rows), count), np.float32)
    for index in range(count):
        start, end = index * grid.block, (index + 1) * grid.block
        # The scale of a block is chosen when the corrections of all earlier blocks are in it.
        block = np.ascontiguousarray(weights[:, start:end], np.float32)[:, None]
        scale, zero = (found[:, 0] for found in _fit(block, grid.top))
        scales[:, index], zeros[:, index] = scale, zero
        errors = np.zeros((len(rows), grid.block))
        for offset, column in enumerate(range(start, end)):
            found = _round(weights[:, column], scale, zero, grid.top)
            values[:, column] = found
            error = (weights[:, column] - (found - zero) * scale) / factor[column, column]
            errors[:, offset] = error
            weights[:, column:end] -= np.outer(error, factor[column, column:end])
        weights[:, end:] -= errors @ factor[start:end, end:]
    return _quantised(grid, inputs, values.reshape(rows.shape), scales, zeros)


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


def _fit(rows: Matrix, top: int) -> tuple[Matrix, Matrix]:
    """Scale and zero point of least squared error for each block, (N, blocks) each."""
    low, high = np.minimum(rows.min(-1), 0), np.maximum(rows.max(-1), 0)
    best = np.full(low.shape, np.inf, np.float32)
    scales, zeros = np.ones_like(low), np.zeros_like(low)
    for shrink in SHRINKS:
        # A block of zeros has no range; any scale represents it.
        scale = np.maximum((high - low) * shrink / top, np.float32(1e-30))
        zero = np.clip(np.rint(-low * shrink / scale), 0, top)
        values = _round(rows, scale[..., None], zero[..., None], top)
        error = (((values - zero[..., None]) * scale[..., None] - rows) ** 2).sum(-1)
        better = error < best
        best[better], scales[better], zeros[better] = error[better], scale[better], zero[better]
    return scales, zeros


def _round(rows: NDArray, scale: NDArray, zero: NDArray, top: int) -> NDArray[np.uint8]:
    return np.clip(np.rint(rows / scale) + zero, 0, top).astype(np.uint8)


def _inverse_factor(second_moment: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Upper Cholesky factor of the damped inverse, (size, size)."""
    inputs = len(second_moment)
    damped = np.eye(size)
    damped[:inputs, :inputs] = second_moment
    mean = float(np.diag(second_moment).mean()) or 1.0
    diagonal = np.arange(inputs)
    damped[diagonal, diagonal] += DAMPING * mean
    inverse = np.linalg.inv(damped)
    return np.ascontiguousarray(np.linalg.cholesky((inverse + inverse.T) / 2).T)


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Two values of four bits in a byte, along the last axis; a half that is left over is 0."""
    if bits == 8:
        return values
    even = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)])
    return (even[..., 0::2] | (even[..., 1::2] << 4)).astype(np.uint8)
