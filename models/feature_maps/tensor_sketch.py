"""Tensor sketch of degree n, by real matrix products.

    phi(x) = IFFT(prod_l FFT(C_l x)),   (C_l x)_r = sum of s_l(i) x_i over i with h_l(i) = r
    kernel = (q . k)^n

with h_l(i) uniform on M places and s_l(i) a random sign, l = 1 ... n. The FFT of C_l x is x times a
fixed complex matrix, and by Parseval the inverse transform changes no inner product: phi is the
real and imaginary parts of the bins 0 ... M/2 of the product, scaled by sqrt(w / M), w = 1, 2, ...,
2, 1. The imaginary parts of the first and last bin are zero and left out, so there are M features.

With s = (q.k)^2, c = sum_i q_i^2 k_i^2, a = |q|^2 |k|^2 - c and b = s - c,

    Var = [2 (s+a+b)^n + (M-2) (s+a)^n + (M-2) (s+b)^n + (M^2 - 2M + 2) s^n] / M^2 - s^n

Source: Pham and Pagh 2013; docs/math.md, "Tensor sketch without a
Fourier operator" and "Variance of the tensor sketch".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import (
    MOST_FACTORS,
    MOST_FEATURES,
    UNBIASED,
    Array,
    FeatureMap,
)
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


@dataclass(frozen=True, kw_only=True)
class TensorSketchOptions:
    """Options of the tensor sketch.

    Attributes:
        features: M, even.
        degree: n.
        seed: of the draws.
    """

    features: int = bounded(128, multiple_of=2, at_most=MOST_FEATURES)
    degree: int = bounded(2, at_least=1, at_most=MOST_FACTORS)
    seed: int = bounded(0, at_least=0)


class TensorSketch(FeatureMap):
    """Feature map ``tensor_sketch``: random features of (q . k)^n."""

    kind = "tensor_sketch"
    kernel = "(q.k)^n"
    exactness = UNBIASED
    positive = False
    kernel_positive = False
    error = (
        "[2 (s+a+b)^n + (M-2) ((s+a)^n + (s+b)^n) + (M^2-2M+2) s^n] / M^2 - s^n with s = (q.k)^2, "
        "a = |q|^2 |k|^2 - c, b = s - c, c = q^2 . k^2, squares by component"
    )
    float32_features = True
    regime = "Powers of q.k in a few hundred features whatever n: an error independent of d."
    failure = "The variance is near (2^(n+1) - 2) / M for unit q = k; the estimate takes any sign."
    Options = TensorSketchOptions

    def __init__(self, head_dim: int, options: TensorSketchOptions | None = None) -> None:
        super().__init__(head_dim, options)
        features, degree = self.options.features, self.options.degree
        rng = draws.generator(self.options.seed)
        self.transforms: Tensor
        self.register_buffer(
            "transforms",
            draws.frozen(
                lambda: transforms(rng, head_dim, degree, features),
                (head_dim, degree, features + 2),
                torch.float32,
            ),
        )

    def frozen(self) -> Sequence[Tensor]:
        return (self.transforms,)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][2] - 2

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        (matrices,) = frozen
        parts = x @ matrices.to(x.dtype).flatten(1)
        real, imaginary, *rest = parts.chunk(2 * matrices.shape[1], -1)
        for c, d in zip(rest[::2], rest[1::2], strict=True):
            real, imaginary = real * c - imaginary * d, real * d + imaginary * c
        return torch.cat([real, imaginary[..., 1:-1]], -1)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        ((name, (_, degree, double)),) = parameters
        parts = b.MatMul(x, b.Reshape(name, b.const([width, degree * double])))
        real, imaginary, *rest = b.Split(parts, outputs=2 * degree, axis=-1, num_outputs=2 * degree)
        for c, d in zip(rest[::2], rest[1::2], strict=True):
            real, imaginary = (
                b.Sub(b.Mul(real, c), b.Mul(imaginary, d)),
                b.Add(b.Mul(real, d), b.Mul(imaginary, c)),
            )
        inner = b.Slice(imaginary, b.const([1]), b.const([-1]), b.const([-1]))
        return str(b.Concat(real, inner, axis=-1))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((query * key).sum(-1) ** self.options.degree)

    def theoretical_error(self, query: Array, key: Array) -> Array:
        q, k = query**2, key**2
        first, second = variance(
            (query * key).sum(-1) ** 2, q.sum(-1) * k.sum(-1), (q * k).sum(-1), self.options.degree
        )
        return first / self.features + second / self.features**2


def variance(square: Array, norms: Array, shared: Array, degree: int) -> tuple[Array, Array]:
    """Coefficients of 1/M and 1/M^2 in the variance of a sketch.

    Args:
        square: s = (q . k)^2.
        norms: |q|^2 |k|^2.
        shared: c = sum_i q_i^2 k_i^2.
        degree: n.
    """
    a, b = norms - shared, square - shared
    both, one, other, none = ((square + x) ** degree for x in (a + b, a, b, 0.0))
    return one + other - 2 * none, 2 * (both - one - other + none)


def transforms(rng: np.random.Generator, width: int, degree: int, size: int) -> Array:
    """FFT of a count sketch of ``size`` places as a matrix, for each factor.

    (width, degree, size + 2): real parts of the bins 0 ... size/2, then the imaginary parts; the
    first factor carries sqrt(w / size).
    """
    places = rng.integers(size, size=(width, degree))
    signs = 2.0 * rng.integers(2, size=(width, degree)) - 1
    bins = np.arange(size // 2 + 1)
    angle = 2 * np.pi * np.arange(size) / size
    waves = np.stack([np.cos(angle), -np.sin(angle)])
    # Whatever the machine's library makes of cos(pi/2).
    waves[np.abs(waves) < 1e-15] = 0
    found = waves[:, places[:, :, None] * bins % size] * signs[:, :, None]
    found[:, :, 0] *= np.sqrt(np.where((bins == 0) | (bins == size // 2), 1, 2) / size)
    return np.asarray(np.concatenate([found[0], found[1]], axis=-1))
