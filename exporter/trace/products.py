"""Cumulative products, for which ONNX has no operator.

    x_1 x_2 ... x_t   =   exp(sum_s log |x_s|) (-1)^(number of negative x_s)

Of tensors that are never negative, such as gates, the logarithm alone is written.
"""

from __future__ import annotations

from typing import Any

from onnxscript import values

from linexport.graph.operators import MOVES, NEVER_NEGATIVE

OPSET = 20


def cumulative(x: Any, dim: int, dtype: int | None = None) -> Any:
    """Write ``aten.cumprod`` as nodes of a graph."""
    op = values.Opset("", OPSET)
    x = x if dtype is None else op.Cast(x, to=int(dtype))
    if is_never_negative(x):
        return op.Exp(op.CumSum(op.Log(x), dim))
    negative = op.CastLike(op.Less(x, op.CastLike(0.0, x)), x)
    odd = op.Mod(op.CumSum(negative, dim), op.CastLike(2.0, x), fmod=1)
    sign = op.Sub(op.CastLike(1.0, x), op.Mul(op.CastLike(2.0, x), odd))
    return op.Mul(sign, op.Exp(op.CumSum(op.Log(op.Abs(x)), dim)))


def is_never_negative(x: Any) -> bool:
    """Return whether the operators that make a value make no negative numbers."""
    node = x.producer()
    while node is not None and node.op_type in MOVES:
        node = node.inputs[0].producer()
    return node is not None and node.op_type in NEVER_NEGATIVE
