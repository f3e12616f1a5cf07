"""Degree-2 monomials x_i x_j, i <= j, scaled so that their inner product is (q . k)^2.

    [x_i^2, sqrt2 x_i x_j (i < j)]        d(d+1)/2 of them, ordered by i, then j

The cross terms carry sqrt2: each unordered pair occurs twice in the square. What the quadratic
maps are made of.
"""

from __future__ import annotations

import math

import numpy as np
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
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1])
    coefficients = torch.where(i == j, 1.0, x.new_full((), math.sqrt(2)))
    return x[..., i] * x[..., j] * coefficients


def pairs_onnx(b: Body, x: str, width: int) -> str:
    """Append the same to an ONNX body.

    A product for every i: gathering the factors of all pairs, which ONNX Runtime copies one by one,
    takes 20 times as long.
    """
    last, end = b.const([-1]), b.const([width])
    starts = [b.const([i]) for i in range(width)]
    rows = [
        b.Mul(b.Slice(x, start, after, last), b.Slice(x, start, end, last))
        for start, after in zip(starts, [*starts[1:], end], strict=True)
    ]
    i, j = np.triu_indices(width)
    return str(b.Mul(b.Concat(*rows, axis=-1), b.const(np.where(i == j, 1.0, math.sqrt(2)))))


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
