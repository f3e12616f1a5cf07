"""Monomials of n components drawn at random.

    phi(x)_j = d^(n/2) M^(-1/2) prod_t x[w_tj],   w_tj uniform on the d components, t = 1 ... n
    kernel   = (q . k)^n

Source: Kar and Karnick 2012 (arXiv 1201.6530), with components in place of sign vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import MOST_FEATURES, UNBIASED, Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

MOST_DEGREE = 252
"""Degree n that float32 holds of heads of width 2: its factor is 2^(n/2)."""


@dataclass(frozen=True, kw_only=True)
class RandomMonomialsOptions:
    """Options of random monomials.

    Attributes:
        features: M.
        degree: n.
        seed: of the draws.
    """

    features: int = bounded(128, at_least=1, at_most=MOST_FEATURES)
    degree: int = bounded(2, at_least=1, at_most=MOST_DEGREE)
    seed: int = bounded(0, at_least=0)


class RandomMonomials(FeatureMap):
    """Feature map ``random_monomials``: monomials of components drawn at random."""

    kind = "random_monomials"
    kernel = "(q.k)^n"
    exactness = UNBIASED
    positive = False
    kernel_positive = False
    error = "(d^n (q^2 . k^2)^n - (q.k)^(2n)) / M, squares by component"
    float32_features = True
    regime = "The cheapest features of a power of q.k: n - 1 products each."
    failure = (
        "The error grows like d^n where a few components dominate; the estimate takes any sign."
    )
    Options = RandomMonomialsOptions

    def __init__(self, head_dim: int, options: RandomMonomialsOptions | None = None) -> None:
        super().__init__(head_dim, options)
        if self.options.degree * math.log2(head_dim) > MOST_DEGREE:
            most = int(MOST_DEGREE / math.log2(head_dim))
            raise UsageError(
                f"Config of feature map 'random_monomials': 'degree' is {self.options.degree}; "
                f"expected at most {most} for heads of width {head_dim}: float32 does not hold "
                f"{head_dim}^(degree/2) of a larger one."
            )
        shape = (self.options.degree, self.options.features)
        rng = draws.generator(self.options.seed)
        self.components: Tensor
        self.register_buffer(
            "components",
            draws.frozen(lambda: rng.integers(head_dim, size=shape), shape, torch.int64),
        )

    def frozen(self) -> Sequence[Tensor]:
        return (self.components,)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][1]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        (chosen,) = frozen
        degree, features = chosen.shape
        product = x[..., chosen[0]]
        for row in chosen[1:]:
            product = product * x[..., row]
        return product * (x.shape[-1] ** (degree / 2) * features**-0.5)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        chosen, (degree, features) = parameters[0].name, parameters[0].shape
        product = b.Mul(x, b.const(width ** (degree / 2) * features**-0.5))
        for t in range(degree):
            row = b.Gather(chosen, b.const(t), axis=0)
            taken = b.Gather(product if t == 0 else x, row, axis=-1)
            product = taken if t == 0 else b.Mul(product, taken)
        return str(product)

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((query * key).sum(-1) ** self.options.degree)

    def theoretical_error(self, query: Array, key: Array) -> Array:
        n, d = self.options.degree, self.head_dim
        second = d**n * (query**2 * key**2).sum(-1) ** n
        return np.asarray((second - (query * key).sum(-1) ** (2 * n)) / self.features)
