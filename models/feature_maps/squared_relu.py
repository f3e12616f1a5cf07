"""max(x, 0)^2: sparser than relu and closer to the peaks of softmax. Source: So et al. 2021.

A query or key with no positive component makes the denominator zero: keep eps > 0.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class SquaredRelu(FeatureMap):
    """Feature map max(x, 0)^2."""

    kind = "squared_relu"
    kernel = "relu(q)^2 . relu(k)^2"
    positive = True
    kernel_positive = True
    float32_features = True
    regime = "Where relu attends too broadly: large components count more, at the same cost."
    failure = "As relu: a query sharing no positive component with any key has denominator 0."
    elementwise = True

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x.relu().square()

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        positive = b.Relu(x)
        return str(b.Mul(positive, positive))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((np.maximum(query, 0) ** 2 * np.maximum(key, 0) ** 2).sum(-1))
