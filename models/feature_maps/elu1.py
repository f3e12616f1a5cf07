"""elu(x) + 1 = x + 1 for x > 0, exp(x) otherwise. Source: Katharopoulos et al. 2020.

Written relu(x) + exp(min(x, 0)): the same function, without the cancellation that elu(x) + 1
suffers for x << 0, and without a branch.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Elu1(FeatureMap):
    """Feature map elu(x) + 1."""

    kind = "elu1"
    kernel = "(elu(q) + 1) . (elu(k) + 1)"
    positive = True
    kernel_positive = True
    regime = "A sound default for models trained with linear attention from the start."
    failure = "Attends broadly: its kernel grows no faster than q . k and is not softmax."
    elementwise = True

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x.relu() + x.clamp(max=0).exp()

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        zero = b.CastLike(b.const(0.0), x)
        return str(b.Add(b.Relu(x), b.Exp(b.Min(x, zero))))

    def kernel_value(self, query: Array, key: Array) -> Array:
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (query, key))
        return np.asarray((q * k).sum(-1))
