"""max(x, 0): the kernel of vision linear attention (EfficientViT, SANA).

A query or key with no positive component makes the denominator zero: keep eps > 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from linexport.models.feature_maps.base import FeatureMap
from linexport.plugins.ops.body import Body


class Relu(FeatureMap):
    kind = "relu"
    kernel = "relu(q) . relu(k)"
    positive = True
    elementwise = True

    @staticmethod
    def phi(x: Tensor, *frozen: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def phi_onnx(b: Body, x: str, *frozen: str) -> str:
        return str(b.Relu(x))

    def kernel_value(
        self, query: NDArray[np.float64], key: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return np.asarray((np.maximum(query, 0) * np.maximum(key, 0)).sum(-1))
