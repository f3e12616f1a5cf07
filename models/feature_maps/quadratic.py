"""The square of the inner product, homogeneous or with a constant.

    c = 0:  phi(x) = [x_i^2, sqrt2 x_i x_j (i < j)]                         kernel (q . k)^2
    c > 0:  phi(x) = [c, sqrt(2c) x_i, x_i^2, sqrt2 x_i x_j (i < j)]        kernel (q . k + c)^2

c is rounded to float32, in which it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.models.config import bounded
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


@dataclass(frozen=True, kw_only=True)
class QuadraticOptions(PairsOptions):
    """Options of ``quadratic``.

    Attributes:
        c: the constant.
    """

    c: float = bounded(0.0, at_least=0, at_most=1e6)


class Quadratic(PairsMap):
    """Feature map ``quadratic``: the features of (q . k + c)^2."""

    kind = "quadratic"
    kernel = "(q.k + c)^2"
    regime = "Sharper than linear attention at exact cost; choose c > 0 to keep the sign of q.k."
    failure = "With c = 0 it cannot tell k from -k, and is 0 for q orthogonal to every key."
    Options = QuadraticOptions

    def __init__(self, head_dim: int, options: QuadraticOptions | None = None) -> None:
        super().__init__(head_dim, options)
        constant = torch.tensor([self.options.c], dtype=torch.float32) if self.options.c else None
        self.c: Tensor | None
        self.register_buffer("c", constant)
        check_memory(self.kind, head_dim, self.features, self.options.memory_limit_gib)

    def frozen(self) -> Sequence[Tensor]:
        return () if self.c is None else (self.c,)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return count_pairs(width) + (1 + width if shapes else 0)

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        if not frozen:
            return pairs(x)
        c = frozen[0].to(x.dtype)
        constant = torch.ones_like(x[..., :1]) * c
        return torch.cat([constant, x * (2 * c).sqrt(), pairs(x)], -1)

    @classmethod
    def pair_scale(cls, width: int) -> float:
        return 1.0

    @classmethod
    def first_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        c = parameters[0].name
        constant = b.Expand(c, b.Concat(b.Shape(x, end=-1), b.const([1]), axis=0))
        return str(b.Concat(constant, b.Mul(x, b.Sqrt(b.Add(c, c))), axis=-1))

    @classmethod
    def kappa_onnx(cls, b: Body, t: str, width: int, *parameters: Parameter) -> str:
        """(t + c)^2."""
        shifted = b.Add(t, parameters[0].name) if parameters else t
        return str(b.Mul(shifted, shifted))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray(((query * key).sum(-1) + float(np.float32(self.options.c))) ** 2)
