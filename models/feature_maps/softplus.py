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
        # Softplus takes no bfloat16 in this operator set.
        return str(b.CastLike(b.Softplus(b.Cast(x, to=TensorProto.FLOAT)), x))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((np.logaddexp(0, query) * np.logaddexp(0, key)).sum(-1))
