"""[softmax(x), softmax(-x)] over the components. Source: Zhang et al. 2024 (arXiv 2402.04347).

The learned matrix that Hedgehog puts in front of it is part of the query and key projections.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Hedgehog(FeatureMap):
    """Feature map [softmax(x), softmax(-x)]."""

    kind = "hedgehog"
    kernel = "softmax(q) . softmax(k) + softmax(-q) . softmax(-k)"
    positive = True
    kernel_positive = True
    regime = "Distilling softmax attention: trained to mimic it, it keeps its peaks."
    failure = "Forgets magnitudes as softmax does; untrained it is not softmax attention."

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return 2 * width

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Concat(b.Softmax(x, axis=-1), b.Softmax(b.Neg(x), axis=-1), axis=-1))

    def kernel_value(self, query: Array, key: Array) -> Array:
        total = np.zeros(query.shape[:-1])
        for sign in (1, -1):
            q, k = (np.exp(sign * x - (sign * x).max(-1, keepdims=True)) for x in (query, key))
            total += (q * k).sum(-1) / q.sum(-1) / k.sum(-1)
        return total
