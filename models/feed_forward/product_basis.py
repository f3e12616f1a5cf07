"""Polynomials of a . z in products of Chebyshev polynomials of the components of z.

    p(a . z) = sum_m C_m T_m1(z_1) ... T_md(z_d)        m_1 + ... + m_d <= n,   |a|_1 <= 1

By T_(k+1)(u) = 2 u T_k(u) - T_(k-1)(u) with u = a . z, on coefficients of this basis, in which

    z_j T_m = (T_(m + e_j) + T_(m - e_j)) / 2        T_(-1) = T_1

|u| <= 1 for z in [-1, 1]^d, where the recurrence is stable: coefficients of T_k(a . z) stay below
2^d. In powers of z they would be of the size of 2^k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linexport.models.feature_maps.base import Array

Indices = NDArray[np.int64]


def count(width: int, degree: int) -> int:
    """M: products of ``width`` polynomials of total degree up to ``degree``."""
    return math.comb(width + degree, degree)


@dataclass(frozen=True)
class ProductBasis:
    """Products of T_m1(z_1) ... T_md(z_d), by rising total degree.

    Attributes:
        degrees: m, (M, d).
        below: position of m - e_j for m_j > 0, else M, (M, d).
        above: position of m + e_j, M where the total degree is n, (M, d).
    """

    degrees: Indices
    below: Indices
    above: Indices

    @classmethod
    def of(cls, width: int, degree: int) -> ProductBasis:
        """All products of ``width`` polynomials with a total degree up to ``degree``."""
        degrees = degree_table(width, degree)
        place = {tuple(m): i for i, m in enumerate(degrees.tolist())}
        size = len(degrees)
        below, above = (np.full((size, width), size) for _ in range(2))
        for i, m in enumerate(degrees.tolist()):
            for j in range(width):
                for found, step in ((below, -1), (above, 1)):
                    moved = (*m[:j], m[j] + step, *m[j + 1 :])
                    found[i, j] = place.get(moved, size)
        return cls(degrees, below, above)

    def times(self, vectors: Array, coefficients: Array) -> Array:
        """Coefficients of (a . z) p, (out, M), of a (out, d) and of p (out, M) below degree n."""
        padded = np.pad(coefficients, ((0, 0), (0, 1)))
        found = np.zeros_like(coefficients)
        for j in range(vectors.shape[1]):
            # z_j T_0 is T_1, and not half of it.
            share = np.where(self.degrees[:, j] == 1, 1.0, 0.5)
            moved = share * padded[:, self.below[:, j]] + 0.5 * padded[:, self.above[:, j]]
            found += vectors[:, j : j + 1] * moved
        return found

    def compose(self, series: Array, vectors: Array) -> Array:
        """Coefficients of sum_k c_k T_k(a . z), (out, M), of c (out, n + 1) and a (out, d)."""
        before = np.zeros((len(series), len(self.degrees)))
        before[:, 0] = 1.0
        current = self.times(vectors, before)
        total = series[:, :1] * before + series[:, 1:2] * current
        for column in series.T[2:]:
            before, current = current, 2 * self.times(vectors, current) - before
            total += column[:, None] * current
        return total


def degree_table(width: int, degree: int) -> Indices:
    """m of every product, (M, d), by rising total degree."""
    found, left = np.zeros((1, 0), np.int64), np.array([degree])
    for _ in range(width):
        counts = left + 1
        repeated = np.repeat(np.arange(len(found)), counts)
        # 0 to left for every row of before.
        next_one = np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = np.concatenate([found[repeated], next_one[:, None]], axis=1)
        left = left[repeated] - next_one
    return np.ascontiguousarray(found[np.argsort(found.sum(1), kind="stable")])
