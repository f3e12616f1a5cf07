"""Weights in few bits: integers with scales, and the float32 numbers that they stand for.

    w[i, j] = (codes[i, j] - zeros[r(i), c(j)]) scales[r(i), c(j)] + offsets[r(i), c(j)]

r and c number the groups of rows and columns that share a scale. Differences of codes and zeros
are integers, which float32 holds exactly, and so are their products with scales in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTensor:
    """One weight as a checkpoint stores it, unpacked.

    Attributes:
        codes: integers, or values of a table or of eight bits, (rows, columns).
        scales: of each group, (groups of rows, groups of columns).
        rows: group of each row.
        columns: group of each column.
        zeros: codes of the value 0, as ``scales``; None: 0.
        offsets: what is added last, as ``scales``; None: nothing.
    """

    codes: Tensor
    scales: Tensor
    rows: Tensor
    columns: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the float32 numbers, (rows, columns)."""
        result = self.codes.to(torch.float32, copy=True)
        if self.zeros is not None:
            result -= self._spread(self.zeros)
        result *= self._spread(self.scales)
        if self.offsets is not None:
            result += self._spread(self.offsets)
        return result

    def _spread(self, groups: Tensor) -> Tensor:
        return groups.float()[:, self.columns][self.rows]


@dataclass(frozen=True)
class StoredTensor:
    """One weight by the name that the model has for it, read when it is indexed.

    Attributes:
        name: of the weight.
        shape: of the weight.
        load: reads it.
        parts: names of the tensors in the files that it is read from.
        load_packed: reads its integers, where ``load`` gives the numbers that they mean.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[], PackedTensor | Tensor]
    parts: frozenset[str]
    load_packed: Callable[[], PackedTensor | None] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers that are read."""
        return torch.float32

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    def read(self) -> Tensor:
        """Return the weight; in float32 where it was in few bits."""
        found = self.load()
        if isinstance(found, PackedTensor):
            found = found.dequantised().reshape(-1)[: self.size].reshape(self.shape)
        return found

    def packed(self) -> PackedTensor | None:
        """Return the weight as it is stored; None where it is not in few bits."""
        found = self.load() if self.load_packed is None else self.load_packed()
        return found if isinstance(found, PackedTensor) else None

    def __getitem__(self, index: object) -> Tensor:
        return self.read()[index]  # type: ignore[index]


def blocks(count: int, size: int) -> Tensor:
    """Return the group of each of ``count`` rows or columns, ``size`` in each group."""
    return torch.arange(count) // size


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of ``bits`` bits that rows of words hold, lowest bits first.

    Integers follow each other without gaps, so those of 3, 5 and 6 bits may lie across two words.

    Args:
        words: (rows, words), of any integer type.
        bits: 1 to 8.
    """
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        parts = [(octets >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).reshape(len(words), -1)
    each = torch.stack([(octets >> shift) & 1 for shift in range(8)], -1).reshape(len(words), -1)
    each = each[:, : each.shape[1] // bits * bits].reshape(len(words), -1, bits)
    total = torch.zeros(each.shape[:2], dtype=torch.uint8)
    for place in range(bits):
        total |= each[..., place] << place
    return total
