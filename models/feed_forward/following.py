"""The linear layer after an activation, which a replacement may take in: z = W_2 y + b_2.

W_2 (Phi(W) Psi(x)) + b_2 = (W_2 Phi(W)) Psi(x) + b_2        computed once
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array


@dataclass(frozen=True)
class Following:
    """A linear layer in float64.

    Attributes:
        weight: W_2, (out, hidden).
        bias: b_2, (out,).
    """

    weight: Array
    bias: Array

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Following:
        """The layer of these parameters."""
        matrix = weight.detach().cpu().double().numpy()
        added = np.zeros(len(matrix)) if bias is None else bias.detach().cpu().double().numpy()
        return cls(matrix, added)

    @property
    def outputs(self) -> int:
        """Rows of W_2."""
        return len(self.weight)

    def __call__(self, y: Array) -> Array:
        """Outputs (n, out) of rows y (n, hidden)."""
        return np.asarray(y @ self.weight.T + self.bias)
