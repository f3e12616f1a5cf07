"""Degree-2 monomials x_i x_j, i <= j, scaled so that their inner product is (q . k)^2.

    [x_i^2, sqrt2 x_i x_j (i < j)]        d(d+1)/2 of them, ordered by i, then j

The cross terms carry sqrt2: each unordered pair occurs twice in the square. What the quadratic
maps are made of.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps.base import FeatureMap
from linexport.plugins.ops import feature_map as op
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

GIBI = 1024**3
_FLOAT_BYTES = 4


def count_pairs(width: int) -> int:
    """Number of monomials, d (d + 1) / 2."""
    return width * (width + 1) // 2


def pairs(x: Tensor) -> Tensor:
    """The monomials of (..., d), as (..., d(d+1)/2)."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1])
    coefficients = torch.where(i == j, 1.0, x.new_full((), math.sqrt(2)))
    return x[..., i] * x[..., j] * coefficients


def pairs_onnx(b: Body, x: str, width: int, scale: float = 1.0) -> list[str]:
    """Append the same times ``scale`` to an ONNX body, as pieces to be concatenated.

    Products are taken for every i: gathering the factors of all pairs, which ONNX Runtime copies
    one by one, takes 20 times as long; and every pass over so many features counts.
    """
    last = b.const([-1])
    places = [b.const([i]) for i in range(width + 1)]
    squares = b.Mul(b.Mul(x, x), b.const(float(scale)))
    left = b.Mul(x, b.const(scale * math.sqrt(2)))
    pieces = []
    for here, after in pairwise(places):
        pieces.append(b.Slice(squares, here, after, last))
        if after != places[-1]:
            rest = b.Slice(x, after, places[-1], last)
            pieces.append(b.Mul(b.Slice(left, here, after, last), rest))
    return pieces


@dataclass(frozen=True, kw_only=True)
class PairsOptions:
    """Options of maps made of pairs.

    Attributes:
        memory_limit_gib: largest state of one head.
    """

    memory_limit_gib: float = bounded(1.0, above=0)


class PairsMap(FeatureMap):
    """A map of some features and, behind them, all pairs times ``pair_scale``."""

    positive = False
    kernel_positive = True
    float32_features = True

    Options: ClassVar[type[PairsOptions]] = PairsOptions

    @classmethod
    @abstractmethod
    def pair_scale(cls, width: int) -> float:
        """Factor of the pairs for a head of that width."""

    @classmethod
    @abstractmethod
    def first_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        """The features ahead of the pairs, as ``phi_onnx``; not called where there are none."""

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        pieces = pairs_onnx(b, x, width, cls.pair_scale(width))
        if cls.feature_count(width, *(p.shape for p in parameters)) > count_pairs(width):
            pieces.insert(0, cls.first_onnx(b, x, width, *parameters))
        return str(b.Concat(*pieces, axis=-1))

    @classmethod
    def _formulas(cls) -> op.Formulas:
        pairs = op.Pairs(scale=cls.pair_scale, first=cls.first_onnx)
        return replace(super()._formulas(), pairs=pairs)


def check_memory(kind: str, width: int, features: int, limit_gib: float) -> None:
    """Refuse heads whose state would not fit.

    Raises:
        UsageError: says how much memory it would need.
    """
    need = _FLOAT_BYTES * features * width
    if need > limit_gib * GIBI:
        raise UsageError(
            f"Feature map {kind!r} at head_dim {width} has M = {features:,} features: the state of "
            f"one head would take {need / GIBI:.2g} GiB, and memory_limit_gib is {limit_gib:g}. "
            "Use a smaller head_dim, a map with a choice of features (tensor_sketch, "
            "random_monomials, favor+), or raise memory_limit_gib."
        )
