"""favor+ with every w_j and its opposite: a kernel estimate by cosh instead of exp.

    phi(x) = (2m)^(-1/2) [exp(w_j . x^), exp(-w_j . x^)] exp(-|x^|^2 / 2),   M = 2m
    kernel = exp(q . k / sqrt(d))

Source: Choromanski et al. 2021 (arXiv 2009.14794), hyperbolic features.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from linexport.models.feature_maps.base import Array, ExponentialMap
from linexport.models.feature_maps.favor import Favor, half_square_onnx
from linexport.models.feature_maps.projected import PairedProjectionOptions, ProjectedMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class FavorHyperbolic(ProjectedMap, ExponentialMap):
    """Feature map ``favor+hyperbolic``: ``favor+`` with pairs of opposite projections."""

    kind = "favor+hyperbolic"
    error = "exp(2 q^.k^) (exp(s) - 1)^2 exp(-s) / M for independent w, s = |q^+k^|^2"
    regime = "Instead of favor+ at the same M: half the projections, and a smaller error."
    failure = "As favor+: the error grows like exp(|q^+k^|^2 / 2)."
    features_each = 2
    Options = PairedProjectionOptions

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

    @classmethod
    def variance(cls, query: Array, key: Array) -> Array:
        s = ((query + key) ** 2).sum(-1)
        return np.asarray(np.exp(2 * (query * key).sum(-1) - s) * np.expm1(s) ** 2 / 2)

    @classmethod
    def covariance(cls, query: Array, key: Array) -> Array:
        return Favor.covariance(query, key)  # of odd powers of w_1 and w_2 the mean is 0
