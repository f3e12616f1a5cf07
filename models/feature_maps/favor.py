"""favor+: positive random features of softmax's kernel.

    phi(x)_j = m^(-1/2) exp(w_j . x^ - |x^|^2 / 2),   x^ = x / d^(1/4),  w_j ~ N(0, I),  M = m
    kernel   = exp(q . k / sqrt(d))

w_j are independent, or orthogonal in blocks of d, which lowers the error. Source: Choromanski et
al. 2021 (arXiv 2009.14794). Attention that normalises stabilises the exponents by a running
maximum per feature.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from linexport.models.feature_maps import orthogonal
from linexport.models.feature_maps.base import Array, ExponentialMap
from linexport.models.feature_maps.projected import ProjectedMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Favor(ProjectedMap, ExponentialMap):
    """Feature map ``favor+``: positive random features of softmax's kernel."""

    kind = "favor+"
    error = "(exp(|q^+k^|^2) - 1) exp(2 q^.k^) / M for independent w, x^ = x/d^(1/4)"
    regime = "Softmax models and softmax-like training while |q.k| is a few sqrt(d): M of 2d to 4d."
    failure = "The error grows like exp(|q^+k^|^2 / 2): far too noisy for large queries and keys."

    @classmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        (w,) = frozen
        scaled = x * x.shape[-1] ** -0.25
        half_square = scaled.square().sum(-1, keepdim=True) / 2
        return scaled @ w.to(x.dtype) - (half_square + math.log(w.shape[1]) / 2)

    @classmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        (w,) = parameters
        scaled = b.Mul(x, b.const(width**-0.25))
        norm = b.Add(half_square_onnx(b, scaled, width), b.const(math.log(w.shape[1]) / 2))
        return str(b.Sub(b.MatMul(scaled, w.name), norm))

    @classmethod
    def variance(cls, query: Array, key: Array) -> Array:
        square = ((query + key) ** 2).sum(-1)
        return np.asarray(np.expm1(square) * np.exp(2 * (query * key).sum(-1)))

    @classmethod
    def covariance(cls, query: Array, key: Array) -> Array:
        half = ((query + key) ** 2).sum(-1) / 2
        shared = orthogonal.covariance(half, query.shape[-1])
        return np.asarray(shared * np.exp(2 * (query * key).sum(-1)))


def half_square_onnx(b: Body, x: str, width: int) -> str:
    """Append |x|^2 / 2 of (..., width), as (..., 1).

    By a product: ONNX Runtime's reductions have the wrong shape where there are no tokens.
    """
    return str(b.MatMul(b.Mul(x, x), b.const(np.full((width, 1), 0.5))))
