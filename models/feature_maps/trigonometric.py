"""Random Fourier features of softmax's kernel.

    phi(x) = m^(-1/2) exp(|x^|^2 / 2) [cos(w_j . x^), sin(w_j . x^)],   w_j ~ N(0, I),  M = 2m
    kernel = exp(q . k / sqrt(d)),   x^ = x / d^(1/4)

Source: Rahimi and Recht 2007; Peng et al. 2021 (arXiv 2103.02143).
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
from linexport.models.feature_maps.base import UNBIASED, Array, FeatureMap
from linexport.models.feature_maps.favor import half_square_onnx
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


@dataclass(frozen=True, kw_only=True)
class TrigonometricOptions:
    """Options of trigonometric random features.

    Attributes:
        features: M, even: a cosine and a sine for each w_j.
        seed: of the draws.
        orthogonal: w_j orthogonal in blocks of d.
    """

    features: int = bounded(128, multiple_of=2)
    seed: int = bounded(0, at_least=0)
    orthogonal: bool = True


class Trigonometric(FeatureMap):
    """Feature map ``trigonometric``: random Fourier features of softmax's kernel."""

    kind = "trigonometric"
    kernel = "exp(q.k/sqrt(d))"
    exactness = UNBIASED
    positive = False
    kernel_positive = False
    error = "exp(|q^|^2 + |k^|^2) (1 - exp(-|q^-k^|^2))^2 / M for independent w"
    float32_features = True
    regime = "Queries close to their keys, where its error vanishes; for softmax take favor+."
    failure = "Error largest where the kernel is small, either sign, and exp(|x^|^2 / 2) overflows."
    Options = TrigonometricOptions

    def __init__(self, head_dim: int, options: TrigonometricOptions | None = None) -> None:
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
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        (w,) = frozen
        scaled = x * x.shape[-1] ** -0.25
        angle = scaled @ w.to(x.dtype)
        half_square = scaled.square().sum(-1, keepdim=True) / 2
        magnitude = (half_square - math.log(w.shape[1]) / 2).exp()
        return torch.cat([angle.cos(), angle.sin()], -1) * magnitude

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        (w,) = parameters
        scaled = b.Mul(x, b.const(width**-0.25))
        angle = b.MatMul(scaled, w.name)
        norm = b.const(math.log(w.shape[1]) / 2)
        magnitude = b.Exp(b.Sub(half_square_onnx(b, scaled, width), norm))
        return str(b.Mul(b.Concat(b.Cos(angle), b.Sin(angle), axis=-1), magnitude))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray(np.exp((query * key).sum(-1) / np.sqrt(self.head_dim)))

    def theoretical_error(self, query: Array, key: Array) -> Array:
        q, k = (x / self.head_dim**0.25 for x in (query, key))
        squares, apart = (q**2 + k**2).sum(-1), ((q - k) ** 2).sum(-1)
        return np.asarray(np.exp(squares) * np.expm1(-apart) ** 2 / self.features)
