"""Cumulative products, for which ONNX has no operator.

    x_1 x_2 ... x_t   =   exp(sum_s log |x_s|) (-1)^(number of negative x_s)

Of tensors that are never negative, such as gates, the logarithm alone is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnxscript import values

from linexport.graph.operators import CHOICES, NEVER_NEGATIVE

OPSET = 20

DEEPEST = 12
"""Operators that are looked at one behind another."""


def cumulative(x: object, dim: int, dtype: int | None = None) -> object:
    """Write ``aten.cumprod`` as nodes of a graph."""
    op = values.Opset("", OPSET)
    x = x if dtype is None else op.Cast(x, to=int(dtype))
    if is_never_negative(x):
        return op.Exp(op.CumSum(op.Log(x), dim))
    negative = op.CastLike(op.Less(x, op.CastLike(0.0, x)), x)
    odd = op.Mod(op.CumSum(negative, dim), op.CastLike(2.0, x), fmod=1)
    sign = op.Sub(op.CastLike(1.0, x), op.Mul(op.CastLike(2.0, x), odd))
    return op.Mul(sign, op.Exp(op.CumSum(op.Log(op.Abs(x)), dim)))


def is_never_negative(x: Any, depth: int = 0) -> bool:
    """Return whether the operators that make a value make no negative numbers.

    So of a gate with a lower bound, l + (1 - l) sigmoid(x), and of 1 - sigmoid(x).
    """
    number = _number(x)
    if number is not None:
        return bool((number >= 0).all())
    node = x.producer()
    if node is None or depth > DEEPEST:
        return False
    given = [i for i in node.inputs if i is not None]
    if node.op_type in ("Add", "Mul"):
        return all(is_never_negative(i, depth + 1) for i in given)
    if node.op_type == "Sub":
        one = _number(given[0])
        return one is not None and bool((one >= 1).all()) and _is_sigmoid(given[1])
    if node.op_type in CHOICES | {"Pow"}:  # a power of what is not negative is not
        return is_never_negative(given[0], depth + 1)
    return node.op_type in NEVER_NEGATIVE


def _is_sigmoid(x: Any) -> bool:
    node = x.producer()
    while node is not None and node.op_type in CHOICES:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Sigmoid"


def _number(x: Any) -> np.ndarray | None:
    """Return a constant, be it cast to a type or not."""
    node = x.producer()
    while node is not None and node.op_type in ("Cast", "CastLike"):
        x = node.inputs[0]
        node = x.producer()
    if node is not None and node.op_type == "Constant":
        value = next(iter(node.attributes.values())).value
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return None if x.const_value is None else np.asarray(x.const_value.numpy())
