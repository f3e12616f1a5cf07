"""Integers, scales and zero points of a checkpoint in the blocks of ``block_quantisation``.

    w[i, j] = (codes[i, j] - zeros[r(i), c(j)]) scales[r(i), c(j)]      as the checkpoint has it
            = (q[i, b, k] - z[i, b]) s[i, b],      j = b size + k       in blocks

    q = codes + shift      z = zeros + shift      s = scales[r, c]

The shift makes signed integers unsigned. A group that is longer than a block gives its scale and
zero point to several; so groups of 16, 32, 48, ... inputs can be held. Inputs whose groups are in
another order (``g_idx`` of GPTQ) are sorted by group, and the product reads them so. An offset o
that is added last is a zero point -o / scale where that is an integer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linexport.quantization.block_quantisation import Grid, Quantised
from linexport.sources.packed.record import PackedTensor

SIZES = (16, 32, 64, 128, 256)
"""Blocks that MatMulNBits has."""

BITS = (4, 8)

_MOST = 2**10
"""Zero points of such a magnitude are out of the range of any integers that are held here."""


class NotExactError(Exception):
    """Weights that no blocks hold exactly; the text says why."""


def as_blocks(packed: PackedTensor) -> Quantised:
    """Return the integers of a weight in blocks, with its own scales and zero points.

    The grid is symmetric where all zero points are in the middle of 4 bits.

    Args:
        packed: as the checkpoint stores it.

    Raises:
        NotExactError: no blocks hold it.
    """
    if packed.codes.is_floating_point():
        raise NotExactError(
            "its numbers are floats or values of a table, and MatMulNBits has evenly spaced ones"
        )
    zeros = _zero_points(packed)
    low, high = _range(packed.codes, zeros)
    shift = _shift(low, high)
    fitting = (b for b in BITS if high + shift < 1 << b and low + shift >= 0)
    bits = next(fitting, None)
    if bits is None:
        raise NotExactError(
            f"its integers and zero points are from {low} to {high}, which 8 bits do not hold"
        )
    order = _order(packed.columns)
    codes, columns = packed.codes, packed.columns
    if order is not None:
        codes, columns = codes[:, order], columns[order]
    grid = Grid(bits, _block(columns, bits))
    first = columns[:: grid.block]
    scales = packed.scales.float()[:, first][packed.rows].contiguous().numpy()
    own = (zeros + shift)[:, first][packed.rows].to(torch.uint8).contiguous().numpy()
    values = _values(codes, shift, own, grid)
    grid = replace(grid, symmetric=bits == min(BITS) and bool((own == grid.middle).all()))
    sorted_inputs = None if order is None else order.numpy()
    return Quantised(grid, codes.shape[1], values, scales, own, sorted_inputs)


def on_grid(made: Quantised, grid: Grid) -> Quantised:
    """Return the same integers with as many bits or more, in blocks of this size or smaller.

    Args:
        made: integers in blocks.
        grid: symmetric only where theirs is.
    """
    if grid.block == made.grid.block:
        return replace(made, grid=grid)
    count, times = grid.blocks(made.inputs), made.grid.block // grid.block
    values = made.values.reshape(len(made.values), -1, grid.block)[:, :count]
    scales = made.scales.repeat(times, 1)[:, :count]
    zeros = made.zeros.repeat(times, 1)[:, :count]
    return replace(made, grid=grid, values=np.ascontiguousarray(values), scales=scales, zeros=zeros)


def _range(codes: Tensor, zeros: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of all integers."""
    both = [(int(x.min()), int(x.max())) for x in (codes, zeros)]
    return min(low for low, _ in both), max(high for _, high in both)


def _shift(low: int, high: int) -> int:
    """Return what makes integers unsigned: half of the numbers that 4 or 8 bits have."""
    if low >= 0:
        return 0
    return next((1 << (b - 1) for b in BITS if -(1 << (b - 1)) <= low and high < 1 << (b - 1)), 128)


def _zero_points(packed: PackedTensor) -> Tensor:
    """Return the integers that stand for the value 0, (groups of rows, groups of columns).

    Raises:
        NotExactError: they are not integers.
    """
    if packed.offsets is not None:
        scales, offsets = packed.scales.double(), packed.offsets.double()
        found = torch.where(scales == 0, torch.zeros_like(scales), torch.round(-offsets / scales))
        found = found.clamp(-_MOST, _MOST)
        if not torch.equal(found * scales, -offsets):
            raise NotExactError(
                "what is added to its groups is not an integer times their scale, so that no "
                "integer stands for 0"
            )
        return found.to(torch.int32)
    if packed.zeros is None:
        return torch.zeros(packed.scales.shape, dtype=torch.int32)
    zeros = packed.zeros.double()
    if not torch.equal(zeros, torch.round(zeros)):
        raise NotExactError("its zero points are not integers")
    return zeros.clamp(-_MOST, _MOST).to(torch.int32)


def _block(columns: Tensor, bits: int) -> int:
    """Return the size of blocks in which no group ends, of those the one of the fewest bytes.

    Raises:
        NotExactError: there is none.
    """
    fitting = [size for size in SIZES if _whole(columns, size)]
    if fitting:
        return min(fitting, key=lambda size: Grid(bits, size).row_bytes(len(columns)))
    raise NotExactError(
        f"its groups of {int((columns == columns[0]).sum())} inputs end inside of blocks of 16"
    )


def _order(columns: Tensor) -> Tensor | None:
    """Return the inputs sorted by group; None where blocks hold them as they are."""
    if _whole(columns, min(SIZES)) or not bool((columns.diff() < 0).any()):
        return None
    return torch.argsort(columns, stable=True)


def _whole(columns: Tensor, size: int) -> bool:
    """Return whether all inputs of each block are of one group."""
    return torch.equal(columns[::size].repeat_interleave(size)[: len(columns)], columns)


def _values(codes: Tensor, shift: int, zeros: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
    """Return q, (N, blocks, block); what fills the last block is 0 in float32."""
    outputs, inputs = codes.shape
    held = np.repeat(zeros[..., None], grid.block, -1).reshape(outputs, -1)
    held[:, :inputs] = (codes.to(torch.int16) + shift).to(torch.uint8).numpy()
    return held.reshape(outputs, -1, grid.block)
