"""max(x, 0): the kernel of vision linear attention (EfficientViT, SANA).

A query or key with no positive component makes the denominator zero: keep eps > 0.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Relu(FeatureMap):
    """Feature map max(x, 0)."""

    kind = "relu"
    kernel = "relu(q) . relu(k)"
    positive = True
    kernel_positive = True
    regime = "Vision models trained with it; the cheapest map, and its features are sparse."
    failure = "A query that shares no positive component with any key has denominator 0."
    elementwise = True

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x.relu()

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Relu(x))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((np.maximum(query, 0) * np.maximum(key, 0)).sum(-1))
