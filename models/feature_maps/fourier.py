"""Random Fourier features of a kernel of the difference, from its spectral density.

    phi(x) = m^{-1/2} [cos w_j.x, sin w_j.x],   M = 2m      E phi(x).phi(y) = E cos w.(x - y) = k

Normal frequencies give a Gaussian kernel, Cauchy ones a Laplace kernel: the formula is the same,
and only the distribution of stored frequencies tells one map from the other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from linexport.models.feature_maps.base import UNBIASED, Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class FourierMap(FeatureMap):
    """A map whose first frozen tensor are the frequencies, (d, m)."""

    exactness = UNBIASED
    positive = False
    kernel_positive = False

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return 2 * shapes[0][1]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        (w,) = frozen
        angle = x @ w.to(x.dtype)
        return torch.cat([angle.cos(), angle.sin()], -1) * w.shape[1] ** -0.5

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        (w,) = parameters
        angle = b.MatMul(x, w.name)
        both = b.Concat(b.Cos(angle), b.Sin(angle), axis=-1)
        return str(b.Mul(both, b.const(w.shape[1] ** -0.5)))


def is_cauchy(frequencies: Array) -> bool:
    """Return whether frequencies are likelier under a Cauchy than under a normal density.

    Each with its scale fitted: the root mean square of the normal one, for the Cauchy one the
    median of |w|.
    """
    w = np.asarray(frequencies, np.float64).ravel()
    scale, variance = float(np.median(np.abs(w))), float(np.mean(w**2))
    if not (scale > 0 and np.isfinite(variance)):
        return False
    normal = -(np.log(2 * np.pi * variance) + 1) / 2
    cauchy = np.mean(np.log(scale / np.pi) - np.log(w**2 + scale**2))
    return bool(cauchy > normal)
