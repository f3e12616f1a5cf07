"""elu(x) + 1 = x + 1 for x > 0, exp(x) otherwise. Source: Katharopoulos et al. 2020.

Written relu(x) + exp(min(x, 0)): the same function, without the cancellation that elu(x) + 1
suffers for x << 0, and without a branch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from linexport.models.feature_maps.base import FeatureMap
from linexport.plugins.ops.body import Body


class Elu1(FeatureMap):
    kind = "elu1"
    kernel = "(elu(q) + 1) . (elu(k) + 1)"
    positive = True
    elementwise = True

    @staticmethod
    def phi(x: Tensor, *frozen: Tensor) -> Tensor:
        return x.relu() + x.clamp(max=0).exp()

    @staticmethod
    def phi_onnx(b: Body, x: str, *frozen: str) -> str:
        zero = b.CastLike(b.const(0.0), x)
        return str(b.Add(b.Relu(x), b.Exp(b.Clip(x, "", zero))))

    def kernel_value(
        self, query: NDArray[np.float64], key: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (query, key))
        return np.asarray((q * k).sum(-1))
