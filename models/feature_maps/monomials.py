"""All monomials of degree n.

    phi(x) = sqrt(n! / (m_1! ... m_d!)) x_1^m_1 ... x_d^m_d,   m_1 + ... + m_d = n
    kernel = (q . k)^n,   M = (d + n - 1)! / (n! (d - 1)!)

What ``quadratic`` is for n = 2; that one is computed faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import MOST_FACTORS, Array, FeatureMap
from linexport.models.feature_maps.pairs import check_memory
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


@dataclass(frozen=True, kw_only=True)
class MonomialsOptions:
    """Options of ``monomials``.

    Attributes:
        degree: n.
        memory_limit_gib: largest state of one head.
    """

    degree: int = bounded(3, at_least=1, at_most=MOST_FACTORS)
    memory_limit_gib: float = bounded(1.0, above=0)


class Monomials(FeatureMap):
    """Feature map ``monomials``: all monomials of one degree."""

    kind = "monomials"
    kernel = "(q.k)^n"
    positive = False
    kernel_positive = False
    float32_features = True
    regime = "Powers of q.k above the second, exactly, for heads of a few components."
    failure = "Features grow like d^n / n!; for odd n the kernel takes either sign."
    Options = MonomialsOptions

    def __init__(self, head_dim: int, options: MonomialsOptions | None = None) -> None:
        super().__init__(head_dim, options)
        degree = self.options.degree
        features = count_monomials(head_dim, degree)
        check_memory(self.kind, head_dim, features, self.options.memory_limit_gib)
        self.components: Tensor
        self.multiplicities: Tensor
        for name, draw, shape in (
            ("components", lambda: components(head_dim, degree), (degree, features)),
            ("multiplicities", lambda: multiplicities(head_dim, degree), (features,)),
        ):
            self.register_buffer(name, draws.frozen(draw, shape, torch.int64))

    def frozen(self) -> Sequence[Tensor]:
        return (self.components, self.multiplicities)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][1]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        chosen, multiplicities = frozen
        product = x[..., chosen[0]]
        for row in chosen[1:]:
            product = product * x[..., row]
        return product * multiplicities.to(x.dtype).sqrt()

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        (chosen, (degree, _)), (multiplicities, _) = parameters
        product = b.Sqrt(b.Cast(multiplicities, to=TensorProto.FLOAT))
        for t in range(degree):
            row = b.Gather(chosen, b.const(t), axis=0)
            product = b.Mul(product, b.Gather(x, row, axis=-1))
        return str(product)

    @classmethod
    def kappa_onnx(cls, b: Body, t: str, width: int, *parameters: Parameter) -> str:
        """t^n, by multiplication."""
        power = t
        for _ in range(parameters[0].shape[0] - 1):
            power = b.Mul(power, t)
        return power

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray((query * key).sum(-1) ** self.options.degree)


def count_monomials(width: int, degree: int) -> int:
    """Number of monomials of a degree."""
    return math.comb(width + degree - 1, degree)


def components(width: int, degree: int) -> Array:
    """Which components are multiplied, (degree, M), in lexicographic order."""
    chosen = list(combinations_with_replacement(range(width), degree))
    return np.asarray(np.array(chosen).reshape(len(chosen), degree).T)


def multiplicities(width: int, degree: int) -> Array:
    """n! / (m_1! ... m_d!): how often each monomial occurs in the power, (M,)."""
    whole = math.factorial(degree)  # beyond 20, int64 does not hold it
    counts = (Counter(c).values() for c in combinations_with_replacement(range(width), degree))
    orders = (math.prod(map(math.factorial, of_one)) for of_one in counts)
    return np.array([whole // order for order in orders], dtype=np.float64)
