"""Comparisons of positions and of masks, as masks.

t - s + c >= 0    is    [s <= t + c]
max(t - s, 0)     is    [s <= t] (t - s)
"""

from __future__ import annotations

from dataclasses import replace

from linexport.recognise import algebra
from linexport.recognise.terms import Form, Iota, PositionOrder, Term


def position_order(a: Form, b: Form, offset: int) -> Form | None:
    """Return a - b + offset >= 0 as an order of positions, or of a mask and a number."""
    difference = algebra.plus(a, algebra.negated(b))
    if difference is None:
        return None
    # t - s + c >= 0 is s <= t + c: an order of two positions. Positions are whole numbers, so
    # a > b is a - 1 >= b.
    up, down, shift = None, None, float(offset)
    # Read the difference as up - down + shift: one position with +1, one with -1, and numbers.
    for term in difference.terms:
        if not term.factors:
            shift += term.coefficient
        elif isinstance(term.factors[0], Iota) and len(term.factors) == 1:
            if term.coefficient == 1 and up is None:
                up = term.factors[0]
            elif term.coefficient == -1 and down is None:
                down = term.factors[0]
            else:
                return None
        else:
            return _threshold(difference, offset)
    if up is None or down is None or shift != int(shift):
        return None
    order = PositionOrder(up.index, down.index, int(shift))
    return Form(difference.dims, (Term(1.0, (order,)),))


def _threshold(difference: Form, offset: int) -> Form | None:
    """Return [c m + shift >= 0] for a mask m of zeros and ones."""
    masks = [t for t in difference.terms if t.factors]
    shift = sum(t.coefficient for t in difference.terms if not t.factors)
    only = masks[0].factors
    if len(masks) > 1 or len(only) > 1 or not isinstance(only[0], PositionOrder):
        return None
    # offset is 0 for >= and -1 for >. c m + shift need not be a whole number: for > it must reach
    # the least number above 0, not 1.
    slack = 0.0 if offset == 0 else -1e-30
    # m has two values, so the comparison does: both outcomes the same is a constant; otherwise it
    # is m or 1 - m.
    values = [masks[0].coefficient * x + shift + slack >= 0 for x in (0, 1)]
    if values[0] == values[1]:
        return algebra.constant(float(values[0]), difference.dims)
    order = only[0] if values[1] else only[0].complement()
    return Form(difference.dims, (Term(1.0, (order,)),))


def equal(a: Form, b: Form) -> Form | None:
    """Return [c m = y] for a mask m of zeros and ones: m where y is c, 1 - m where y is 0."""
    # A mask is c or 0, so it can equal only these two numbers; the comparison is symmetric.
    for x, y in ((a, b), (b, a)):
        orders = [t for t in x.terms if t.of(PositionOrder)]
        if len(x.terms) == 1 and orders and len(orders[0].factors) == 1 and y.scalar is not None:
            if y.scalar == orders[0].coefficient:
                return replace(x, terms=(Term(1.0, orders[0].factors),))
            if y.scalar == 0:
                return algebra.complement(replace(x, terms=(Term(1.0, orders[0].factors),)))
    return None


def rectify(a: Form) -> Form | None:
    """Return max(t - s, 0) = [s <= t] (t - s), for positions."""
    if len(a.terms) != 2 or a.leaf is not None:
        return None
    # Where t - s < 0 the mask is 0, elsewhere the difference is itself.
    above = position_order(a, algebra.constant(0.0), 0)
    return above and algebra.times(above, a)


def clip(a: Form, *limits: Form) -> Form | None:
    """Return max(t - s, 0) of positions clipped at zero from below."""
    return rectify(a) if len(limits) == 1 and limits[0].scalar == 0 else None
