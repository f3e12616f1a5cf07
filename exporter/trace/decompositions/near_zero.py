"""exp(x) - 1 and log(1 + x) with all digits near zero, where torch's exporter writes them so.

    expm1(x)  =  tanh(x / 2) (exp(x) + 1)
    log1p(x)  =  log(u) x / (u - 1),   u = 1 + x as it is rounded;   x where that is 1

In float32 1 + 1e-8 is 1: the exporter's expm1 and log1p of 1e-8 are 0. The logarithm of a rounded u
is as far from log1p(x) as u - 1 is from x (Kahan).
"""

from __future__ import annotations

from onnxscript import values

OPSET = 20


def exponential(x: object) -> object:
    """Write ``aten.expm1`` as nodes of a graph."""
    op = values.Opset("", OPSET)
    half, one = op.CastLike(0.5, x), op.CastLike(1.0, x)
    return op.Mul(op.Tanh(op.Mul(x, half)), op.Add(op.Exp(x), one))


def logarithm(x: object) -> object:
    """Write ``aten.log1p`` as nodes of a graph."""
    op = values.Opset("", OPSET)
    zero, one = op.CastLike(0.0, x), op.CastLike(1.0, x)
    total = op.Add(x, one)
    rounded = op.Sub(total, one)
    # The quotient of infinities is NaN, where that of equal numbers is 1.
    ratio = op.Where(op.Equal(rounded, x), one, op.Div(x, rounded))
    return op.Where(op.Equal(rounded, zero), x, op.Mul(op.Log(total), ratio))
