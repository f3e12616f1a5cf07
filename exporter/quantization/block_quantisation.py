"""Block-wise quantisation of a weight matrix.

    W (N, K) ~ (q - z) s,   q in 0 .. 2^bits - 1

with one scale s and one integer zero point z for each block of ``size`` consecutive inputs of one
output. The last block is padded with zeros where the block size does not divide K. A symmetric grid
has z = 2^(bits - 1) everywhere, which is not stored; its scales have either sign, since q reaches
one step further below z than above, unless they have to be positive.

    W (N, K) ~ f(q) s       f(q): the number of 8 bits in the format E4M3 whose bits q are

is the floating grid. A block as long as the inputs is one scale for each output.

Scales are numbers of the type that the graph multiplies in: they are rounded to it before values
are chosen for them. ``nearest`` rounds every weight; ``gptq`` is in a module of its own. The layout
is that of ONNX Runtime's MatMulNBits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SCALE_TYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of scales by their names."""

SHRINKS = np.linspace(0.64, 1.0, 10, dtype=np.float32)
"""Parts of a block's range that are tried: clipping an outlier can serve all others."""

SHIFTS = (0, -1, 1)
FEW = 15
"""Neighbours of the nearest zero point are tried for so few values: each is a large step."""

SMALLEST = np.float32(1e-30)
"""Least magnitude of a scale."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3 = np.float32(ml_dtypes.finfo(E4M3).max)

AT_ONCE = 2**17
"""Weights that are rounded at once, or computed from their values."""

IN_CACHE = 2**15
"""Weights whose scales are searched at once: they and their errors are in a core's cache."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    """The numbers a weight may become.

    Attributes:
        bits: of one weight, 4 or 8.
        block: weights that share a scale and a zero point, a power of two from 16 or all inputs.
        symmetric: the zero point is the middle.
        scales: type of the scales, one of ``SCALE_TYPES``.
        positive: scales are, of a symmetric grid.
        floating: values are floats, of a symmetric grid of 8 bits.
    """

    bits: int
    block: int
    symmetric: bool = False
    scales: str = "float32"
    positive: bool = False
    floating: bool = False

    @property
    def top(self) -> int:
        """Largest value of q."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return int(2 ** (self.bits - 1))

    def blocks(self, inputs: int) -> int:
        """Number of blocks of one output."""
        return -(-inputs // self.block)

    def row_bytes(self, inputs: int) -> int:
        """Size of one output: values, scales and zero points."""
        count = self.blocks(inputs)
        zeros = 0 if self.symmetric else -(-count * self.bits // 8)
        return count * (self.block * self.bits // 8 + SCALE_TYPES[self.scales].itemsize) + zeros

    def as_stored(self, scales: Matrix) -> Matrix:
        """Round scales to their type; none becomes zero."""
        if self.scales == "float32":
            return scales
        kind = SCALE_TYPES[self.scales]
        found = scales.astype(kind).astype(np.float32)
        least = np.float32(ml_dtypes.finfo(kind).smallest_subnormal)
        return np.where(found == 0, np.copysign(least, scales), found)


@dataclass(frozen=True)
class Quantised:
    """A matrix (N, K) on a grid.

    Attributes:
        grid: the grid.
        inputs: K.
        values: q, uint8 (N, blocks, block); of a floating grid its bits.
        scales: s, numbers of the grid's type in float32 (N, blocks).
        zeros: z, uint8 (N, blocks).
        order: int64 (K,), the input at each place of the blocks; None: inputs are in their order.
    """

    grid: Grid
    inputs: int
    values: NDArray[np.uint8]
    scales: Matrix
    zeros: NDArray[np.uint8]
    order: NDArray[np.int64] | None = None

    def matrix(self) -> Matrix:
        """The matrix that the runtime computes with, float32 (N, K)."""
        result = np.empty((len(self.values), self.inputs), np.float32)
        places = slice(None) if self.order is None else self.order
        for own in self._rows_at_once():
            numbers = centred(self.values[own], self.zeros[own, :, None], self.grid)
            numbers *= self.scales[own, :, None]
            result[own, places] = numbers.reshape(len(numbers), -1)[:, : self.inputs]
        return result

    def _rows_at_once(self) -> Iterator[slice]:
        """Yield the places of outputs whose weights are computed at once."""
        size = max(1, AT_ONCE // max(1, self.inputs))
        yield from (slice(start, start + size) for start in range(0, len(self.values), size))

    def packed(self) -> dict[str, NDArray]:
        """Return what is stored, by name: values (N, blocks, bytes), scales and zero points.

        Of four bits the lower half of a byte comes first. A symmetric grid has no zero points.
        """
        bits = self.grid.bits
        scales = self.scales.astype(SCALE_TYPES[self.grid.scales], copy=False)
        stored: dict[str, NDArray] = {"values": _pack(self.values, bits), "scales": scales}
        return stored if self.grid.symmetric else {**stored, "zeros": _pack(self.zeros, bits)}


def nearest(matrix: Matrix, grid: Grid) -> Quantised:
    """Round every weight to the grid of least squared error.

    Args:
        matrix: (N, K), finite.
        grid: bits and block size.
    """
    parts = [p for p in np.array_split(matrix, max(1, matrix.size // AT_ONCE)) if len(p)]
    found = [_nearest_rows(part, grid) for part in parts]
    return quantised(grid, matrix.shape[1], *(np.concatenate(x) for x in zip(*found, strict=True)))


def _nearest_rows(matrix: Matrix, grid: Grid) -> tuple[NDArray[np.uint8], Matrix, Matrix]:
    """Return values (N, blocks, block), scales and zero points of some outputs."""
    rows = in_blocks(matrix, grid)
    scales, zeros = fit(rows, grid)
    return round_to_grid(rows, scales[..., None], zeros[..., None], grid), scales, zeros


def quantised(
    grid: Grid, inputs: int, values: NDArray[np.uint8], scales: Matrix, zeros: Matrix
) -> Quantised:
    """Return the matrix of these values; zero points are integers in float32."""
    return Quantised(grid, inputs, values, scales, zeros.astype(np.uint8))


def in_blocks(matrix: Matrix, grid: Grid) -> Matrix:
    """(N, K) as (N, blocks, block), the last block filled with zeros."""
    outputs, inputs = matrix.shape
    count = grid.blocks(inputs)
    padded = np.pad(matrix, ((0, 0), (0, count * grid.block - inputs)))
    return padded.reshape(outputs, count, grid.block)


def fit(rows: Matrix, grid: Grid) -> tuple[Matrix, Matrix]:
    """Scale and zero point of least squared error for each block, (N, blocks) each.

    Args:
        rows: (N, blocks, block).
        grid: says how many values there are, and where the zero point may be.
    """
    columns = np.ascontiguousarray(rows.reshape(-1, grid.block).T)
    found = fit_columns(columns, grid)
    scales, zeros = (own.reshape(rows.shape[:2]) for own in found)
    return scales, zeros


def fit_columns(columns: Matrix, grid: Grid, cost: Matrix | None = None) -> tuple[Matrix, Matrix]:
    """Scale and zero point of least squared error for each of M blocks, (M,) each.

    Args:
        columns: (block, M): blocks lie side by side, so that each step of the search is one
            operation on consecutive numbers.
        grid: see ``fit``.
        cost: of a squared error at each place, (block,); None: all alike.
    """
    tried = _symmetric if grid.symmetric else _asymmetric
    if grid.floating:
        tried = _floating
    if cost is None:
        cost = np.ones(len(columns), np.float32)
    size = max(1, IN_CACHE // len(columns))
    parts = (columns[:, start : start + size] for start in range(0, columns.shape[1], size))
    found = [_best(part, grid, cost, tried(part, grid)) for part in parts]
    scales, zeros = (np.concatenate(own) for own in zip(*found, strict=True))
    return scales, zeros


def _asymmetric(columns: Matrix, grid: Grid) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield scales and zero points for parts of the range that each block has."""
    low, high = np.minimum(columns.min(0), 0), np.maximum(columns.max(0), 0)
    shifts = SHIFTS if grid.top <= FEW else (0,)
    for shrink, shift in itertools.product(SHRINKS, shifts):
        # A block of zeros has no range; any scale represents it.
        scale = np.maximum((high - low) * shrink / grid.top, SMALLEST)
        zero = np.clip(np.rint(-low * shrink / scale) + shift, 0, grid.top).astype(np.float32)
        yield scale, zero


def _symmetric(columns: Matrix, grid: Grid) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield scales by which each block's largest magnitude, or part of it, is at either end."""
    low, high = columns.min(0), columns.max(0)
    largest = np.where(-low > high, low, high)
    middle = np.full(largest.shape, grid.middle, np.float32)
    for end, shrink in itertools.product((0 - grid.middle, grid.top - grid.middle), SHRINKS):
        scale = largest * shrink / np.float32(end)
        scale = np.abs(scale) if grid.positive else scale
        yield np.where(np.abs(scale) < SMALLEST, SMALLEST, scale), middle


def _floating(columns: Matrix, grid: Grid) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield scales by which each block's largest magnitude, or part of it, is the largest float."""
    largest = np.abs(columns).max(0)
    nothing = np.zeros(largest.shape, np.float32)
    for shrink in SHRINKS:
        yield np.maximum(largest * shrink / LARGEST_E4M3, SMALLEST), nothing


def _best(
    columns: Matrix, grid: Grid, cost: Matrix, tried: Iterable[tuple[Matrix, Matrix]]
) -> tuple[Matrix, Matrix]:
    best = np.full(columns.shape[1], np.inf, np.float32)
    scales, zeros = np.ones_like(best), np.zeros_like(best)
    errors = np.empty(columns.shape, np.float32)
    for exact, zero in tried:
        scale = grid.as_stored(exact)
        _numbers(columns, scale, zero, grid, errors)
        errors *= scale
        errors -= columns
        np.square(errors, out=errors)
        error = cost @ errors
        better = error < best
        for own, found in ((best, error), (scales, scale), (zeros, zero)):
            np.copyto(own, found, where=better)
    return scales, zeros


def _numbers(columns: Matrix, scale: Matrix, zero: Matrix, grid: Grid, result: Matrix) -> None:
    """Write ``centred`` of ``round_to_grid`` to ``result``."""
    if grid.floating:
        result[:] = centred(round_to_grid(columns, scale, zero, grid), zero, grid)
        return
    np.divide(columns, scale, out=result)
    np.rint(result, out=result)
    np.maximum(result, -zero, out=result)
    np.minimum(result, grid.top - zero, out=result)


def round_to_grid(rows: NDArray, scale: NDArray, zero: NDArray, grid: Grid) -> NDArray[np.uint8]:
    """Return the values q nearest to these weights."""
    if grid.floating:
        return np.clip(rows / scale, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3).view(np.uint8)
    return np.clip(np.rint(rows / scale) + zero, 0, grid.top).astype(np.uint8)


def centred(values: NDArray[np.uint8], zero: NDArray, grid: Grid) -> NDArray:
    """Return q - z, or the floats that q are; times the scale it is the weight."""
    if grid.floating:
        return values.view(E4M3).astype(np.float32)
    return values.astype(np.float32) - zero


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Two values of four bits in a byte, along the last axis; a half that is left over is 0."""
    if bits == 8:
        return values
    even = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)])
    return (even[..., 0::2] | (even[..., 1::2] << 4)).astype(np.uint8)
