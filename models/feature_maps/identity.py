"""phi(x) = x: plain linear attention, the kernel q . k.

It takes either sign, so a normaliser can vanish: use it without one.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Identity(FeatureMap):
    """Feature map phi(x) = x."""

    kind = "identity"
    kernel = "q . k"
    positive = False
    kernel_positive = False
    regime = "Plain linear attention without a normaliser: delta and gated rules, RetNet, Mamba2."
    failure = "The kernel takes either sign, so a denominator can vanish: do not normalise."
    elementwise = True

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Identity(x))

    @classmethod
    def kappa_onnx(cls, b: Body, t: str, width: int, *parameters: Parameter) -> str:
        return str(b.Identity(t))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((query * key).sum(-1))
