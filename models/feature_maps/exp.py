"""exp(x), component by component. Source: the causal form of Shen et al. 2021 (arXiv 1812.01243).

Attention that normalises stabilises it by a running maximum per feature, so it cannot overflow.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, ExponentialMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Exp(ExponentialMap):
    """Feature map exp(x)."""

    kind = "exp"
    kernel = "exp(q) . exp(k) = sum_i exp(q_i + k_i)"
    regime = "Peaked attention with M = d; trained from the start, normalised."
    failure = "Without a normaliser it overflows, at components above 88 in float32."
    elementwise = True

    @classmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x

    @classmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Identity(x))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray(np.exp(query + key).sum(-1))
