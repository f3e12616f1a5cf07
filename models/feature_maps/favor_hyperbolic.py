"""favor+ with every w_j and its opposite: a kernel estimate by cosh instead of exp.

    phi(x) = (2m)^(-1/2) [exp(w_j . x^), exp(-w_j . x^)] exp(-|x^|^2 / 2),   M = 2m
    kernel = exp(q . k / sqrt(d))

Source: Choromanski et al. 2021 (arXiv 2009.14794), hyperbolic features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import UNBIASED, Array, ExponentialMap
from linexport.models.feature_maps.favor import half_square_onnx
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


@dataclass(frozen=True, kw_only=True)
class FavorHyperbolicOptions:
    """Options of the hyperbolic form of favor+.

    Attributes:
        features: M, even: two for each w_j.
        seed: of the draws.
        orthogonal: w_j orthogonal in blocks of d.
    """

    features: int = bounded(128, multiple_of=2)
    seed: int = bounded(0, at_least=0)
    orthogonal: bool = True


class FavorHyperbolic(ExponentialMap):
    """Feature map ``favor+hyperbolic``: ``favor+`` with pairs of opposite projections."""

    kind = "favor+hyperbolic"
    kernel = "exp(q.k/sqrt(d))"
    exactness = UNBIASED
    error = "exp(2 q^.k^) (exp(s) - 1)^2 exp(-s) / M for independent w, s = |q^+k^|^2"
    regime = "Instead of favor+ at the same M: half the projections, and a smaller error."
    failure = "As favor+: the error grows like exp(|q^+k^|^2 / 2)."
    Options = FavorHyperbolicOptions

    def __init__(self, head_dim: int, options: FavorHyperbolicOptions | None = None) -> None:
        super().__init__(head_dim, options)
        chosen = self.options
        drawn = draws.projection(head_dim, chosen.features // 2, chosen.seed, chosen.orthogonal)
        self.projection: Tensor
        self.register_buffer("projection", drawn)

    def frozen(self) -> Sequence[Tensor]:
        return (self.projection,)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return 2 * shapes[0][1]

    @classmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        (w,) = frozen
        scaled = x * x.shape[-1] ** -0.25
        half_square = scaled.square().sum(-1, keepdim=True) / 2
        projected = scaled @ w.to(x.dtype)
        both = torch.cat([projected, -projected], -1)
        return both - (half_square + math.log(2 * w.shape[1]) / 2)

    @classmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        (w,) = parameters
        scaled = b.Mul(x, b.const(width**-0.25))
        norm = b.Add(half_square_onnx(b, scaled, width), b.const(math.log(2 * w.shape[1]) / 2))
        projected = b.MatMul(scaled, w.name)
        return str(b.Sub(b.Concat(projected, b.Neg(projected), axis=-1), norm))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray(np.exp((query * key).sum(-1) / np.sqrt(self.head_dim)))

    def theoretical_error(self, query: Array, key: Array) -> Array:
        q, k = (x / self.head_dim**0.25 for x in (query, key))
        s = ((q + k) ** 2).sum(-1)
        return np.asarray(np.exp(2 * (q * k).sum(-1) - s) * np.expm1(s) ** 2 / self.features)
