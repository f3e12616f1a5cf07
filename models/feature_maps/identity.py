"""phi(x) = x: plain linear attention, the kernel q . k.

It takes either sign, so a normaliser can vanish: use it without one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from linexport.models.feature_maps.base import FeatureMap
from linexport.plugins.ops.body import Body


class Identity(FeatureMap):
    kind = "identity"
    kernel = "q . k"
    positive = False
    elementwise = True

    @staticmethod
    def phi(x: Tensor, *frozen: Tensor) -> Tensor:
        return x

    @staticmethod
    def phi_onnx(b: Body, x: str, *frozen: str) -> str:
        return str(b.Identity(x))

    def kernel_value(
        self, query: NDArray[np.float64], key: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return np.asarray((query * key).sum(-1))
