"""Softmax's kernel that fades with distance, by positive features; for heads of any width.

    phi(x)_j = M^(-1/2) exp(w_j . s x^ - (2 s^2 - 1) |x^|^2 / 2),   s^2 = 1 + sqrt(d) / tau^2
    kernel   = exp(q . k / sqrt(d)) exp(-|q - k|^2 / (2 tau^2)),    x^ = x / d^(1/4),  w_j ~ N(0, I)

The second factor is exp(q . k / tau^2) times a factor of the query and one of the key, so that the
product is favor+ of sharper scores with weights of the keys: its features are positive, and a
denominator that they sum to is positive too. Error, with e that of favor+ for s q and s k:
e exp(-(|q|^2 + |k|^2) / tau^2). See docs/math.md, "Locality".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import (
    LARGEST_SCALE,
    LEAST_SCALE,
    UNBIASED,
    Array,
    ExponentialMap,
)
from linexport.models.feature_maps.favor import Favor, half_square_onnx
from linexport.models.feature_maps.projected import ProjectionOptions
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


@dataclass(frozen=True, kw_only=True)
class FavorGaussianOptions(ProjectionOptions):
    """Options of ``favor+*gaussian``: those of ``favor+``, and the width of the second kernel.

    Attributes:
        bandwidth: tau; None: sqrt(2 d), the distance of queries and keys of unit variance.
    """

    bandwidth: float | None = bounded(None, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)


class FavorGaussian(ExponentialMap):
    """Feature map ``favor+*gaussian``: positive features of softmax times nearness."""

    kind = "favor+*gaussian"
    kernel = "exp(q.k/sqrt(d)) exp(-|q - k|^2/(2 tau^2))"
    exactness = UNBIASED
    error = (
        "that of favor+ of s q and s k, times exp(-(|q|^2 + |k|^2)/tau^2), s^2 = 1+sqrt(d)/tau^2"
    )
    regime = (
        "Softmax attention that prefers near keys, at any d; positive, so it may be normalised."
    )
    failure = "As favor+ of scores s^2 times as large: too noisy for tau far below sqrt(d)."
    Options = FavorGaussianOptions

    def __init__(self, head_dim: int, options: FavorGaussianOptions | None = None) -> None:
        super().__init__(head_dim, options)
        chosen = self.options
        sharp = self._sharpness()
        drawn = draws.projection(head_dim, chosen.features, chosen.seed, chosen.orthogonal)
        made = draws.frozen(partial(np.array, [2 * sharp - 1]), (1,), torch.float32)
        self.projection: Tensor
        self.damping: Tensor
        self.register_buffer("projection", drawn * math.sqrt(sharp))
        self.register_buffer("damping", made)

    def _bandwidth(self) -> float:
        given: float | None = self.options.bandwidth
        return math.sqrt(2 * self.head_dim) if given is None else given

    def _sharpness(self) -> float:
        return 1 + math.sqrt(self.head_dim) / self._bandwidth() ** 2

    def frozen(self) -> Sequence[Tensor]:
        return self.projection, self.damping

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][1]

    @classmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        w, damping = (p.to(x.dtype) for p in frozen)
        scaled = x * x.shape[-1] ** -0.25
        half_square = scaled.square().sum(-1, keepdim=True) / 2
        return scaled @ w - (damping * half_square + math.log(w.shape[1]) / 2)

    @classmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        w, damping = parameters
        scaled = b.Mul(x, b.const(width**-0.25))
        weighed = b.Mul(half_square_onnx(b, scaled, width), damping.name)
        return str(
            b.Sub(b.MatMul(scaled, w.name), b.Add(weighed, b.const(math.log(w.shape[1]) / 2)))
        )

    def kernel_value(self, query: Array, key: Array) -> Array:
        exponent = ((query - key) ** 2).sum(-1) / (2 * self._bandwidth() ** 2)
        return np.asarray(np.exp((query * key).sum(-1) / math.sqrt(self.head_dim) - exponent))

    def theoretical_error(self, query: Array, key: Array) -> Array:
        root = math.sqrt(self._sharpness())
        error = Favor.error_of(root * query, root * key, self.features, self.options.orthogonal)
        sizes = (query**2 + key**2).sum(-1) / self._bandwidth() ** 2
        return np.asarray(error * np.exp(-sizes))
