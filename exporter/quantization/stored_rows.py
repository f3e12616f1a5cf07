"""Rows of a checkpoint's weights, found by the float32 numbers that they mean.

    h(w) = sum_i bits(w_i) c_i  mod 2^64        c_i odd and random

bits(x) are those of a float32, with 0 for -0. Rows, not whole weights, are looked up: so experts
that the model stacks and projections that it joins or splits are found as well. Rows of one h may
differ: the numbers have to be compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from linexport.quantization.block_quantisation import AT_ONCE, Matrix
from linexport.sources.packed.record import StoredTensor
from linexport.system import memory


@dataclass(frozen=True)
class MatchedRows:
    """Rows of a matrix that are rows of one stored weight.

    Attributes:
        tensor: the stored weight.
        places: rows of the matrix.
        rows: those of the weight that they are, all of its sizes but the last counted as one.
    """

    tensor: StoredTensor
    places: NDArray[np.int64]
    rows: NDArray[np.int64]


class StoredRows:
    """All rows of stored weights, by what they mean.

    Args:
        tensors: the weights; each is read once, here.
        widths: lengths of the rows that are looked for.
    """

    def __init__(self, tensors: Iterable[StoredTensor], widths: set[int]) -> None:
        self._tensors = [t for t in tensors if len(t.shape) > 1 and t.shape[-1] in widths]
        hashes = [_hashes(t.read().float().reshape(-1, t.shape[-1]).numpy()) for t in self._tensors]
        self._starts = np.cumsum([0, *(len(own) for own in hashes)])[:-1]
        joined = np.concatenate([np.empty(0, np.uint64), *hashes])
        self._positions = np.argsort(joined, kind="stable")
        self._hashes = joined[self._positions]

    def match(self, matrix: Matrix) -> list[MatchedRows]:
        """Return the stored rows that a matrix is made of; none where one of its rows is not found.

        Args:
            matrix: (N, K).
        """
        hashes = _hashes(matrix)
        first, end = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        if not len(self._hashes) or np.any(first == end):
            return []
        positions = self._nearest(first, end)
        owner = np.searchsorted(self._starts, positions, "right") - 1
        rows = positions - self._starts[owner]
        order = np.argsort(owner, kind="stable")
        borders = np.flatnonzero(np.diff(owner[order])) + 1
        return [
            MatchedRows(self._tensors[owner[own[0]]], own, rows[own])
            for own in np.split(order, borders)
        ]

    def _nearest(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each row among all.

        Of stored rows with the same numbers, such as zeros, it is that nearest to its neighbours.
        """
        positions, known = self._positions[first], np.flatnonzero(end - first == 1)
        for index in np.flatnonzero(end - first > 1).tolist():
            there = _nearest_of(known, index) if len(known) else 0
            expected = int(positions[there] + index - there)
            positions[index] = _nearest_of(self._positions[first[index] : end[index]], expected)
        return positions


def _nearest_of(numbers: NDArray[np.int64], number: int) -> int:
    """Return the number nearest to another, of numbers in ascending order."""
    place = int(np.searchsorted(numbers, number))
    around = numbers[max(0, place - 1) : place + 1]
    return int(around[np.abs(around - number).argmin()])


def _hashes(matrix: Matrix) -> NDArray[np.uint64]:
    """Return h of every row."""
    factors = _factors(matrix.shape[1])
    found = [_bits(part) @ factors for part in parts(matrix)]
    memory.trim_memory()
    return np.concatenate([np.empty(0, np.uint64), *found])


def _bits(part: Matrix) -> NDArray[np.uint64]:
    return (part + np.float32(0)).view(np.uint32).astype(np.uint64)


@cache
def _factors(width: int) -> NDArray[np.uint64]:
    drawn = np.random.default_rng(width).integers(0, 2**64, width, np.uint64)
    return drawn | np.uint64(1)


def parts(matrix: Matrix) -> Iterator[Matrix]:
    """Yield the rows of a matrix, some at a time."""
    count = max(1, AT_ONCE // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), count):
        yield matrix[start : start + count]
