"""Degree-2 monomials x_i x_j, i <= j, scaled so that their inner product is (q . k)^2.

    [x_i^2, sqrt2 x_i x_j (i < j)]        d(d+1)/2 of them

The cross terms carry sqrt2: each unordered pair occurs twice in the square. What the quadratic
maps are made of.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.plugins.ops.body import Body

GIBI = 1024**3
_FLOAT_BYTES = 4


def count(width: int) -> int:
    """How many monomials there are."""
    return width * (width + 1) // 2


def pairs(x: Tensor) -> Tensor:
    """The monomials of (..., d), as (..., d(d+1)/2)."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], offset=1)
    return torch.cat([x.square(), x[..., i] * (x[..., j] * math.sqrt(2))], -1)


def pairs_onnx(b: Body, x: str, width: int) -> str:
    """Append the same to an ONNX body.

    Each component times all later ones, in one product: on ONNX Runtime as fast as gathering both
    factors for one token, and many times faster for more, where a Gather copies number by number.
    """
    parts = [b.Mul(x, x)]
    scaled, end = b.Mul(x, b.const(math.sqrt(2))), b.const([width])
    for i in range(width - 1):
        first, second = b.const([i]), b.const([i + 1])
        one = b.Slice(scaled, first, second, b.const([-1]))
        parts.append(b.Mul(one, b.Slice(x, second, end, b.const([-1]))))
    return str(b.Concat(*parts, axis=-1))


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
