"""softmax(x) over the components of each query and each key.

Source: queries as in Shen et al. 2021 (arXiv 1812.01243), keys as in Hedgehog, Zhang et al. 2024
(arXiv 2402.04347).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Softmax(FeatureMap):
    """Feature map softmax(x)."""

    kind = "softmax"
    kernel = "softmax(q) . softmax(k)"
    positive = True
    kernel_positive = True
    regime = "Bounded features whatever the scale of the inputs; peaked, with M = d."
    failure = "Forgets magnitudes: adding a constant to all components of a key changes nothing."

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x.softmax(-1)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Softmax(x, axis=-1))

    def kernel_value(self, query: Array, key: Array) -> Array:
        q, k = (np.exp(x - x.max(-1, keepdims=True)) for x in (query, key))
        return np.asarray((q * k).sum(-1) / q.sum(-1) / k.sum(-1))
