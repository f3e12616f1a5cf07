"""One polynomial for each output, in an inner product: p_i(x) = sum_k c_ik (v_i . x')^k."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linexport.models.feature_maps.base import Array


@dataclass(frozen=True)
class Polynomials:
    """One polynomial for each output, on an interval of its own.

    Attributes:
        coefficients: c, (out, n + 1).
        vectors: v, (out, d + 1).
    """

    coefficients: Array
    vectors: Array

    @property
    def degree(self) -> int:
        """n."""
        return self.coefficients.shape[1] - 1

    def at(self, rows: Array) -> Array:
        """p_i of rows x', (rows, out), by Horner's rule."""
        u = rows @ self.vectors.T
        value = np.zeros_like(u)
        for column in self.coefficients.T[::-1]:
            value = value * u + column
        return value

    def terms(self) -> list[int]:
        """Degrees above 1 that occur."""
        return [k for k in range(2, self.degree + 1) if self.coefficients[:, k].any()]
