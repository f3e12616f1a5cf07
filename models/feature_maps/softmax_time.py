"""softmax over the components of a query, and over the tokens, feature by feature, of the keys.

    phi_q(q)_j = softmax(q)_j        phi_k(k_t)_j = exp(k_tj) / sum_s exp(k_sj)

Source: Shen et al. 2021 (arXiv 1812.01243), as in lucidrains' linear-attention-transformer. Every
feature of the keys sums to 1 over the tokens and every query's to 1 over the features, so the
denominator is 1 and normalising changes nothing. The normaliser of a feature is a sum over the
whole sequence and does not cancel: this is not a causal map; the same library's causal form, keys
exp(k) under one denominator, is the map ``exp``. Padded tokens are left out of the sum.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from linexport.models.feature_maps.base import Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class SoftmaxTime(FeatureMap):
    """Softmax over the tokens of packed (B, T, H*d) or rows (T, d), the last axis but one."""

    kind = "softmax_time"
    kernel = "softmax(q) . exp(k_t) / sum_s exp(k_s)"
    positive = True
    kernel_positive = True
    regime = "Bidirectional models trained with it; needs no normaliser."
    failure = "Refused where attention is causal: keys are normalised over the whole sequence."
    over_time = True

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x.softmax(-1)

    @classmethod
    def phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return x.softmax(-2)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Softmax(x, axis=-1))

    @classmethod
    def phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Softmax(x, axis=-2))

    def kernel_value(self, query: Array, key: Array) -> Array:
        """Rows of ``key`` are the sequence."""
        q, k = np.exp(query - query.max(-1, keepdims=True)), np.exp(key - key.max(-2))
        return np.asarray((q * k / k.sum(-2)).sum(-1) / q.sum(-1))
