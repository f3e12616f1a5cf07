"""The Taylor polynomial of softmax's kernel, to second order.

    phi(x) = [1, x^_i, x^_i^2 / sqrt2, x^_i x^_j (i < j)],   x^ = x / d^(1/4)
    kernel = 1 + t + t^2 / 2,   t = q . k / sqrt(d)

The features may be negative; the kernel never is less than 1/2. Source: Arora et al. 2024
(arXiv 2402.18668).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from linexport.models.feature_maps.base import Array
from linexport.models.feature_maps.pairs import (
    PairsMap,
    PairsOptions,
    check_memory,
    count_pairs,
    pairs,
)
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class Taylor2(PairsMap):
    """Feature map ``taylor2``: the second-order Taylor polynomial of softmax's kernel."""

    kind = "taylor2"
    kernel = "1 + t + t^2/2, t = q.k/sqrt(d)"
    regime = "Close to softmax while |q.k| < 2 sqrt(d); exact, for heads of 16 to 64."
    failure = "For t < -1 the kernel grows again: very unlike keys are attended to."

    def __init__(self, head_dim: int, options: PairsOptions | None = None) -> None:
        super().__init__(head_dim, options)
        check_memory(self.kind, head_dim, self.features, self.options.memory_limit_gib)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return 1 + width + count_pairs(width)

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        return torch.cat([torch.ones_like(x[..., :1]), x, pairs(x) * math.sqrt(0.5)], -1)

    @classmethod
    def pair_scale(cls, width: int) -> float:
        return float((2 * width) ** -0.5)

    @classmethod
    def first_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        one = b.Expand(b.const([1.0]), b.Concat(b.Shape(x, end=-1), b.const([1]), axis=0))
        return str(b.Concat(one, b.Mul(x, b.const(width**-0.25)), axis=-1))

    @classmethod
    def kappa_onnx(cls, b: Body, t: str, width: int, *parameters: Parameter) -> str:
        """1 + t (1 + t / 2) of scaled t."""
        scaled = b.Mul(t, b.const(width**-0.5))
        inner = b.Add(b.Mul(scaled, b.const(0.5)), b.const(1.0))
        return str(b.Add(b.Mul(scaled, inner), b.const(1.0)))

    def kernel_value(self, query: Array, key: Array) -> Array:
        t = (query * key).sum(-1) / np.sqrt(self.head_dim)
        return np.asarray(1 + t + t**2 / 2)
