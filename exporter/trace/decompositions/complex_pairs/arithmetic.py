"""Functions of complex numbers, element by element, in real ones.

    (a + b i) (c + d i)  =  a c - b d + (a d + b c) i
    exp(a + b i)         =  exp(a) cos b + exp(a) sin b i
    z ** p               =  |z| ** p (cos(p arg z) + i sin(p arg z))

|z| and quotients are scaled by the larger part: squares of numbers below 1e-19 are no longer
numbers of float32, and rates to the power of a position are as small.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.fx import Node

from linexport.trace.decompositions.complex_pairs.writer import (
    ComplexPair,
    PairWriter,
    Part,
    Rule,
    Rules,
    arguments,
    aten,
    is_zero,
    operands,
    value_of,
)

MOST_FACTORS = 8
"""Powers up to this one are products."""


def add(w: PairWriter, x: ComplexPair, y: ComplexPair) -> ComplexPair:
    """Return x + y."""
    return ComplexPair(*map(w.add, x, y))


def sub(w: PairWriter, x: ComplexPair, y: ComplexPair) -> ComplexPair:
    """Return x - y."""
    return ComplexPair(*map(w.sub, x, y))


def mul(w: PairWriter, x: ComplexPair, y: ComplexPair) -> ComplexPair:
    """Return x y."""
    (a, b), (c, d) = x, y
    return ComplexPair(w.sub(w.mul(a, c), w.mul(b, d)), w.add(w.mul(a, d), w.mul(b, c)))


def div(w: PairWriter, x: ComplexPair, y: ComplexPair) -> ComplexPair:
    """Return x / y, by (c + d i) / s, where s is the larger of |c| and |d|."""
    c, d = y
    if d == 0.0:
        return ComplexPair(w.div(x.re, c), w.div(x.im, c))
    if c == 0.0:
        return ComplexPair(w.div(x.im, d), w.neg(w.div(x.re, d)))
    size = w(aten.maximum.default, w.apply(aten.abs.default, c), w.apply(aten.abs.default, d))
    c, d = w.div(c, size), w.div(d, size)
    re, im = mul(w, x, ComplexPair(c, w.neg(d)))
    squared = w.mul(w.add(w.mul(c, c), w.mul(d, d)), size)
    return ComplexPair(w.div(re, squared), w.div(im, squared))


def exp(w: PairWriter, x: ComplexPair) -> ComplexPair:
    """Return the exponential of x."""
    size: Part = 1.0 if x.re == 0.0 else w.apply(aten.exp.default, x.re)
    return polar(w, size, x.im)


def polar(w: PairWriter, size: Part, angle: Part) -> ComplexPair:
    """Return the number of a size and an angle."""
    if angle == 0.0:
        return ComplexPair(size, 0.0)
    cos, sin = (w.apply(f, angle) for f in (aten.cos.default, aten.sin.default))
    return ComplexPair(w.mul(size, cos), w.mul(size, sin))


def absolute(w: PairWriter, x: ComplexPair) -> Node:
    """Return |x|."""
    if 0.0 in x:
        return w.apply(aten.abs.default, x.im if x.re == 0.0 else x.re)
    a, b = (w.apply(aten.abs.default, part) for part in x)
    size = w(aten.maximum.default, a, b)
    # 0 / 0 is left out; the root is then 0, and so is the whole.
    unit = w.where(w(aten.eq.Scalar, size, 0), 1.0, size)
    squares = (w.mul(part, part) for part in (w.div(a, unit), w.div(b, unit)))
    root = w.apply(aten.sqrt.default, w.add(*squares))
    return w(aten.mul.Tensor, size, root)


def angle(w: PairWriter, x: ComplexPair) -> Node:
    """Return the angle of x in [-pi, pi]; the signs of zeros decide which end it is."""
    if isinstance(x.im, float):
        return w.where(_is_below(w, x.re), math.copysign(math.pi, x.im), 0.0)
    half = w.where(_is_below(w, x.im), -math.pi, math.pi)
    level, upright = w(aten.eq.Scalar, x.im, 0), w.mul(half, 0.5)
    if isinstance(x.re, float):
        return w.where(level, 0.0, upright)
    zero, behind = w(aten.eq.Scalar, x.re, 0), _is_below(w, x.re)
    slope = w.apply(aten.atan.default, w.div(x.im, w.where(zero, 1.0, x.re)))
    found = w.where(behind, w.add(slope, half), slope)
    return w.where(w(aten.logical_and.default, zero, w(aten.ne.Scalar, x.im, 0)), upright, found)


def _is_below(w: PairWriter, part: Part) -> Node:
    """Return whether a part is negative, or the zero that is."""
    x = w.full([], part) if isinstance(part, float) else part
    small = w(aten.lt.Scalar, w.apply(aten.reciprocal.default, x), 0)
    return w(aten.logical_or.default, w(aten.lt.Scalar, x, 0), small)


def log(w: PairWriter, x: ComplexPair) -> ComplexPair:
    """Return the logarithm of x."""
    return ComplexPair(w.apply(aten.log.default, absolute(w, x)), angle(w, x))


def power(w: PairWriter, x: ComplexPair, exponent: object) -> ComplexPair:
    """Return x ** exponent, where that is a number, or a pair."""
    if isinstance(exponent, int | float) and abs(exponent) in range(1, MOST_FACTORS + 1):
        found = x
        for _ in range(int(abs(exponent)) - 1):
            found = mul(w, found, x)
        return found if exponent > 0 else div(w, ComplexPair(1.0, 0.0), found)
    p, q = w.pair(exponent)
    if isinstance(x.re, float) and x.re > 0 and x.im == 0.0:
        return exp(w, mul(w, ComplexPair(p, q), ComplexPair(math.log(x.re), 0.0)))
    size, turn = absolute(w, x), angle(w, x)
    raised = aten.pow.Tensor_Tensor if isinstance(p, Node) else aten.pow.Tensor_Scalar
    grown: Part = w(raised, size, p)
    turned = w.mul(turn, p)
    if q != 0.0:  # exp((p + q i) (log |x| + i arg x)), where |x| ** p has taken care of 0
        scale = w.apply(aten.log.default, w.where(w(aten.eq.Scalar, size, 0), 1.0, size))
        grown = w.mul(grown, w.apply(aten.exp.default, w.neg(w.mul(turn, q))))
        turned = w.add(turned, w.mul(scale, q))
    return polar(w, grown, turned)


def unit(w: PairWriter, x: ComplexPair) -> ComplexPair:
    """Return x / |x|, and 0 of 0."""
    size = absolute(w, x)
    size = w.where(w(aten.eq.Scalar, size, 0), 1.0, size)
    return ComplexPair(*(w.div(part, size) for part in x))


def conjugate(w: PairWriter, x: ComplexPair) -> ComplexPair:
    """Return the conjugate of x."""
    return ComplexPair(x.re, w.neg(x.im))


def negative(w: PairWriter, x: ComplexPair) -> ComplexPair:
    """Return -x."""
    return ComplexPair(w.neg(x.re), w.neg(x.im))


def _of_one(function: Callable[[PairWriter, ComplexPair], ComplexPair | Node]) -> Rule:
    return lambda w, node: function(w, w.pair(operands(node)[0]))


def _of_two(
    function: Callable[[PairWriter, ComplexPair, ComplexPair], ComplexPair], swapped: bool = False
) -> Rule:
    def rule(w: PairWriter, node: Node) -> ComplexPair:
        given = arguments(node)
        x, y = w.pair(given["self"]), w.pair(given["other"])
        x, y = (y, x) if swapped else (x, y)
        alpha = given.get("alpha", 1)
        if alpha == 1:
            return function(w, x, y)
        return function(w, x, mul(w, y, w.pair(alpha)))

    return rule


def _add_product(w: PairWriter, node: Node) -> ComplexPair:
    given = arguments(node)
    x, y, z, factor = map(w.pair, (*operands(node)[:3], given.get("value", 1)))
    return add(w, x, mul(w, mul(w, y, z), factor))


def _power(w: PairWriter, node: Node) -> ComplexPair:
    given = arguments(node)
    return power(w, w.pair(given["self"]), given["exponent"])


def _complex(w: PairWriter, node: Node) -> ComplexPair:
    re, im = (w.fitted(ComplexPair(x, 0.0), value_of(node).shape).re for x in operands(node))
    real, imaginary = map(is_zero, operands(node))
    return ComplexPair(re, 0.0 if imaginary and not real else im)


def _polar(w: PairWriter, node: Node) -> ComplexPair:
    return polar(w, *operands(node))


RULES: Rules = {
    "abs": _of_one(absolute),
    "add": _of_two(add),
    "addcmul": _add_product,
    "angle": _of_one(angle),
    "complex": _complex,
    **dict.fromkeys(("_conj", "conj", "conj_physical", "_conj_physical"), _of_one(conjugate)),
    "div": _of_two(div),
    "exp": _of_one(exp),
    "log": _of_one(log),
    "mul": _of_two(mul),
    "neg": _of_one(negative),
    "polar": _polar,
    "pow": _power,
    "reciprocal": _of_one(lambda w, x: div(w, ComplexPair(1.0, 0.0), x)),
    "rsub": _of_two(sub, swapped=True),
    "sgn": _of_one(unit),
    "sqrt": _of_one(lambda w, x: power(w, x, 0.5)),
    "square": _of_one(lambda w, x: mul(w, x, x)),
    "sub": _of_two(sub),
}
