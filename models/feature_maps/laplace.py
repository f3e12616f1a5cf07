"""The Laplace kernel: nearness in the L1 norm for heads of any width.

    phi(x) = m^{-1/2} [cos w_j.x, sin w_j.x]      w_ij ~ Cauchy(0, 1 / delta), M = 2m
    E phi(x).phi(y) = exp(-|x - y|_1 / delta) = k        Var = (1 - k^2) / M

Source: Rahimi and Recht 2007; the transform of a product of Laplace kernels is one of Cauchy
densities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import LARGEST_SCALE, LEAST_SCALE, MOST_FEATURES, Array
from linexport.models.feature_maps.fourier import FourierMap, is_cauchy


@dataclass(frozen=True, kw_only=True)
class LaplaceOptions:
    """Options of ``laplace``.

    Attributes:
        features: M, even: a cosine and a sine for each w_j.
        delta: L1 distance over which the kernel falls by e; None: d, which is about the distance
            of queries and keys of unit variance. Far below it only noise is left.
        seed: of the draws.
    """

    features: int = bounded(128, multiple_of=2, at_most=MOST_FEATURES)
    delta: float | None = bounded(None, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)
    seed: int = bounded(0, at_least=0)


class Laplace(FourierMap):
    """Feature map ``laplace``: random features of exp(-|q - k|_1 / delta)."""

    kind = "laplace"
    kernel = "exp(-|q - k|_1 / delta)"
    error = "(1 - k^2) / M"
    regime = "A factor that keeps attention local where d > 4; delta of the order of d."
    failure = (
        "Cannot tell kernels below M^{-1/2} from 0, as all are where delta is far below d; "
        "estimates of them can be negative."
    )
    Options = LaplaceOptions

    def __init__(self, head_dim: int, options: LaplaceOptions | None = None) -> None:
        super().__init__(head_dim, options)
        count, delta = self.options.features // 2, self._delta
        rng = draws.generator(self.options.seed)
        self.frequencies: Tensor
        self.register_buffer(
            "frequencies",
            draws.frozen(
                lambda: rng.standard_cauchy((head_dim, count)) / delta,
                (head_dim, count),
                torch.float32,
            ),
        )

    @property
    def _delta(self) -> float:
        return self.head_dim if self.options.delta is None else self.options.delta

    def frozen(self) -> Sequence[Tensor]:
        return (self.frequencies,)

    @classmethod
    def drawn_like(cls, *frozen: Array) -> bool:
        return is_cauchy(frozen[0])

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray(np.exp(-np.abs(query - key).sum(-1) / self._delta))

    def theoretical_error(self, query: Array, key: Array) -> Array:
        kernel = self.kernel_value(query, key)
        return np.asarray((1 - kernel**2) / self.options.features)
