"""Random Fourier features of softmax's kernel.

    phi(x) = m^(-1/2) exp(|x^|^2 / 2) [cos(w_j . x^), sin(w_j . x^)],   w_j ~ N(0, I),  M = 2m
    kernel = exp(q . k / sqrt(d)),   x^ = x / d^(1/4)

Source: Rahimi and Recht 2007; Peng et al. 2021 (arXiv 2103.02143).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from linexport.models.feature_maps import orthogonal
from linexport.models.feature_maps.base import Array
from linexport.models.feature_maps.favor import half_square_onnx
from linexport.models.feature_maps.projected import PairedProjectionOptions, ProjectedMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Trigonometric(ProjectedMap):
    """Feature map ``trigonometric``: random Fourier features of softmax's kernel."""

    kind = "trigonometric"
    positive = False
    kernel_positive = False
    error = "exp(|q^|^2 + |k^|^2) (1 - exp(-|q^-k^|^2))^2 / M for independent w"
    float32_features = True
    regime = "Queries close to their keys, where its error vanishes; for softmax take favor+."
    failure = "Error largest where the kernel is small, either sign, and exp(|x^|^2 / 2) overflows."
    features_each = 2
    Options = PairedProjectionOptions

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

    @classmethod
    def variance(cls, query: Array, key: Array) -> Array:
        squares, distances = (query**2 + key**2).sum(-1), ((query - key) ** 2).sum(-1)
        return np.asarray(np.exp(squares) * np.expm1(-distances) ** 2 / 2)

    @classmethod
    def covariance(cls, query: Array, key: Array) -> Array:
        squares, distances = (query**2 + key**2).sum(-1), ((query - key) ** 2).sum(-1)
        return np.asarray(np.exp(squares) * orthogonal.covariance(-distances / 2, query.shape[-1]))
