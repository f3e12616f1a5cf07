"""Any polynomial of the inner product whose coefficients are not negative.

    kernel = a_0 + a_1 t + ... + a_n t^n,   t = q . k,   a_m >= 0
    phi(x) = sqrt(a_m m! / (m_1! ... m_d!)) x_1^m_1 ... x_d^m_d,   m_1 + ... + m_d = m <= n
    M = sum of (d + m - 1)! / (m! (d - 1)!), both over the m with a_m > 0

``quadratic``, ``monomials`` and ``taylor2`` are cases. The kernel of a product t is computed as

    sum_m b_m (t + c)^m,   c = a_(n-1) / (n a_n)

the same polynomial about its centre, where no b_m is negative: (t + c)^n is then one power of a
sum, and keeps its digits where the terms of a_0 + ... + a_n t^n cancel. It loses none anywhere, as

    sum_m b_m |t + c|^m  <=  sum_m b_m (|t| + c)^m  =  sum_m a_m |t|^m

bounds its rounding by that of Horner's rule. With a negative b_m no such bound holds, and c is
0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import MOST_FACTORS, Array, FeatureMap
from linexport.models.feature_maps.monomials import components, count_monomials, multiplicities
from linexport.models.feature_maps.pairs import check_memory
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

ROUNDING = float(np.finfo(np.float32).eps)
"""A term about the centre that is below 0 by this part of (t + c)^n at most, for t >= 0, is 0."""

SMALLEST = 1e-30
"""The largest coefficient is not below it, so that float32 holds the digits of those that count."""

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class PolynomialOptions:
    """Options of ``polynomial``.

    Attributes:
        coefficients: a_0 to a_n; the last is above 0.
        memory_limit_gib: largest state of one head.
    """

    coefficients: list[float] = field(default_factory=lambda: [1.0, 1.0, 0.5])
    memory_limit_gib: float = bounded(1.0, above=0)


class Polynomial(FeatureMap):
    """Feature map ``polynomial``: the features of any polynomial of q . k."""

    kind = "polynomial"
    kernel = "a_0 + a_1 q.k + ... + a_n (q.k)^n"
    positive = False
    kernel_positive = False
    float32_features = True
    regime = "Any polynomial of q.k that a model was trained with, exactly, for narrow heads."
    failure = (
        "Features grow like d^n / n!; where the polynomial is negative, sums of it may vanish."
    )
    Options = PolynomialOptions

    def __init__(self, head_dim: int, options: PolynomialOptions | None = None) -> None:
        super().__init__(head_dim, options)
        a = _checked(self.options.coefficients)
        features = feature_count(head_dim, a)
        check_memory(self.kind, head_dim, features, self.options.memory_limit_gib)
        made = parameters(head_dim, a)
        self.components: Tensor
        self.squares: Tensor
        self.centred: Tensor
        for name, value in zip(("components", "squares", "centred"), made, strict=True):
            kind = torch.from_numpy(value).dtype
            self.register_buffer(name, draws.frozen(partial(np.asarray, value), value.shape, kind))

    def frozen(self) -> Sequence[Tensor]:
        return (self.components, self.squares, self.centred)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[1][0]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        chosen, squares, _ = frozen
        extended = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        product = squares.to(x.dtype).sqrt()
        for row in chosen:
            product = product * extended[..., row]
        return product

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        (chosen, (degree, _)), (squares, _), _ = parameters
        one = b.Expand(b.const([1.0]), b.Concat(b.Shape(x, end=-1), b.const([1]), axis=0))
        extended, product = b.Concat(x, one, axis=-1), b.Sqrt(squares)
        for place in range(degree):
            row = b.Gather(chosen, b.const(place), axis=0)
            product = b.Mul(product, b.Gather(extended, row, axis=-1))
        return str(product)

    @classmethod
    def kappa_onnx(cls, b: Body, t: str, width: int, *parameters: Parameter) -> str:
        """sum_m b_m (t + c)^m, by Horner's rule."""
        centred, (size,) = parameters[2]
        c, *about = (b.Gather(centred, b.const(i)) for i in range(size))
        shifted = b.Add(t, c)
        value = b.Mul(shifted, about[-1])
        for coefficient in about[-2:0:-1]:
            value = b.Mul(b.Add(value, coefficient), shifted)
        return str(b.Add(value, about[0]))

    def kernel_value(self, query: Array, key: Array) -> Array:
        a = np.asarray(self.options.coefficients, np.float64)
        return np.asarray(np.polynomial.polynomial.polyval((query * key).sum(-1), a))


def _checked(coefficients: Sequence[float]) -> Sequence[float]:
    # A feature's square is a coefficient times its multiplicity, at most n!.
    largest = LARGEST / math.factorial(min(max(len(coefficients) - 1, 0), MOST_FACTORS))
    numbers = all(isinstance(a, int | float) and 0 <= a <= largest for a in coefficients)
    degrees = 1 < len(coefficients) <= MOST_FACTORS + 1
    if not (numbers and degrees and coefficients[-1] > 0 and max(coefficients) >= SMALLEST):
        raise UsageError(
            f"Feature map 'polynomial' has coefficients {list(coefficients)!r}; expected two "
            f"to {MOST_FACTORS + 1} numbers, a_0 to a_n, of 0 to {largest:.1g}, the last above 0 "
            f"and the largest at least {SMALLEST:g}."
        )
    return coefficients


def feature_count(width: int, coefficients: Sequence[float]) -> int:
    """M, from the coefficients a_0 to a_n."""
    return sum(count_monomials(width, m) for m, a in enumerate(coefficients) if a)


def parameters(
    width: int, coefficients: Sequence[float]
) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """Return the tensors that the formulas need for heads of width d, from a_0 to a_n.

    Returns:
        Components that are multiplied, (n, M) int64, d for the number 1; the square of the factor
        of each feature, (M,) float32; and c, b_0, ..., b_n, (n + 2,) float32.
    """
    degree, chosen, squares = len(coefficients) - 1, [], []
    for m, a in enumerate(coefficients):
        if a:
            ones = np.full((degree - m, count_monomials(width, m)), width)
            chosen.append(np.concatenate([ones, components(width, m)]))
            squares.append(a * multiplicities(width, m))
    squared = np.concatenate(squares).astype(np.float32)
    return np.concatenate(chosen, 1).astype(np.int64), squared, centred(coefficients)


def centred(coefficients: Sequence[float]) -> NDArray[np.generic]:
    """Return c, b_0, ..., b_n with sum_m a_m t^m = sum_m b_m (t + c)^m and no b_m below 0.

    Either b_(n-1) = 0, or c = 0 and b = a.
    """
    a = np.asarray(coefficients, np.float64)
    degree = len(a) - 1
    about = np.zeros(degree + 1)
    with np.errstate(over="ignore", invalid="ignore"):
        c = a[-2] / (degree * a[-1])
        for m in range(degree + 1):
            power = np.polynomial.polynomial.polypow([-c, 1.0], m)  # t^m as powers of t + c
            about[: m + 1] += a[m] * power
        about[-2] = 0.0
        # At t = 0 lower powers of t + c are largest relative to (t + c)^n.
        negligible = ROUNDING * a[-1] * c ** np.arange(degree, -1, -1)
        about[(about < 0) & (-about <= negligible)] = 0.0
    if degree < 2 or not (c <= LARGEST and (about >= 0).all()):
        return np.asarray([0.0, *a], np.float32)
    return np.asarray([c, *about], np.float32)
