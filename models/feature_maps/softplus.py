"""log(1 + exp(x)): a smooth relu that is never zero."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional as F

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Softplus(FeatureMap):
    """Feature map log(1 + exp(x))."""

    kind = "softplus"
    kernel = "log(1 + exp(q)) . log(1 + exp(k))"
    positive = True
    kernel_positive = True
    regime = "Where relu's zeros or zero gradients hurt; otherwise it behaves like relu."
    failure = "Attends broadly, like relu and elu1: features grow only linearly."
    elementwise = True

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        # torch returns x itself beyond its threshold, 20: good for float32 only.
        return F.softplus(x, threshold=40)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        """relu(x) + log(1 + u) with u = exp(-|x|), in float32: Softplus takes no bfloat16.

        ONNX Runtime's Softplus is one scalar after another, at twice the time. With w = 1 + u
        rounded, u - (w - 1) is what rounding took from u: to first order, what log(w) lacks.
        """
        wide, one = b.Cast(x, to=TensorProto.FLOAT), b.const(1.0)
        u = b.Exp(b.Neg(b.Abs(wide)))
        w = b.Add(u, one)
        return str(b.CastLike(b.Sum(b.Relu(wide), b.Log(w), b.Sub(u, b.Sub(w, one))), x))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((np.logaddexp(0, query) * np.logaddexp(0, key)).sum(-1))
