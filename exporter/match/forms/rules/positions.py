"""Comparisons of positions and of masks, as masks, and differences of running sums within bounds.

t - s + c >= 0       is    [s <= t + c]
1 where t = s        is    [s <= t] - [s <= t - 1]
max(t - s, 0)        is    [s <= t] (t - s)
max(G_s - G_t, 0)    is    [s <= t] (G_s - G_t),  where G never rises
|t - s|              is    [s <= t] (t - s) + [s > t] (s - t)
min(G_t - G_s, 0)    is    [s <= t] (G_t - G_s),  where G never rises
"""

from __future__ import annotations

import math
from dataclasses import replace

from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.sign_analysis import sign_of
from linexport.match.forms.terms import Form, Iota, Leaf, PositionOrder, Term
from linexport.match.forms.unify import match


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


def same_position(a: Form, b: Form) -> Form | None:
    """Return [s <= t] - [s <= t - 1], which is 1 where t = s, of positions t and s."""
    whole = position_order(a, b, 0)
    if whole is None or len(whole.terms) != 1 or len(whole.terms[0].factors) != 1:
        return None
    (order,) = whole.terms[0].factors
    if not isinstance(order, PositionOrder) or order.offset:
        return None
    if not len(order.row) == len(order.column) == 1 or order.row[0].size != order.column[0].size:
        return None
    earlier = replace(order, offset=-1)
    return replace(whole, terms=(Term(1.0, (order,)), Term(-1.0, (earlier,))))


def rectify(a: Form) -> Form | None:
    """Return max(x, 0) = -min(-x, 0), of positions or of a running sum that never rises."""
    fallen = minimum(algebra.negated(a), algebra.constant(0.0))
    return _rectified_positions(a) if fallen is None else algebra.negated(fallen)


def _rectified_positions(a: Form) -> Form | None:
    """Return max(t - s + c, 0) = [s <= t + c] (t - s + c), for positions."""
    if sum(bool(t.factors) for t in a.terms) != 2 or a.leaf is not None:
        return None
    # Where t - s + c < 0 the mask is 0, elsewhere the difference is itself.
    above = position_order(a, algebra.constant(0.0), 0)
    return above and algebra.times(above, a)


def absolute(a: Form) -> Form | None:
    """Return |t - s|: the difference on one side of the diagonal, and its negative on the other."""
    if sum(bool(t.factors) for t in a.terms) != 2 or a.leaf is not None:
        return None
    above = position_order(a, algebra.constant(0.0), 0)
    below = above and algebra.complement(above)
    right = above and algebra.times(above, a)
    left = below and algebra.times(below, algebra.negated(a))
    return left and right and algebra.plus(left, right)


def minimum(a: Form, b: Form) -> Form | None:
    """Return min(G_t - G_s, 0) = [s <= t] (G_t - G_s) for a G that never rises."""
    for difference, bound in ((a, b), (b, a)):
        if bound.scalar == 0 and len(difference.terms) == 2:
            for later, earlier in (difference.terms, difference.terms[::-1]):
                order = _falls(later, earlier, difference.axes)
                if order is not None:
                    mask = Form(difference.dims, (Term(1.0, (order,)),))
                    return algebra.times(mask, difference)
    return None


def _falls(later: Term, earlier: Term, free: frozenset[Axis]) -> PositionOrder | None:
    """Return the order [s <= t] in which later + earlier = G_t - G_s is at most 0, else more."""
    to, since = _position(later), _position(earlier)
    if to is None or since is None or len(to[0]) != len(since[0]) or not rate_falls(later):
        return None
    at_row = dict(zip(since[0], ((a,) for a in to[0]), strict=True))
    moved = _at_offset(earlier.scaled(-1.0).rename(at_row), to[1])
    # later(t) = -earlier(s) with s renamed to t: both are values of one running sum G.
    alike = math.isclose(moved.coefficient, later.coefficient)
    if not alike or match(later, moved, free) is None:
        return None
    return PositionOrder(to[0], since[0], to[1] - since[1])


def _position(term: Term) -> tuple[Index, int] | None:
    """Return t and c, where a term is sum_u [u <= t + c] g_u or a multiple of t."""
    places = [(f.index, 0) for f in term.of(Iota)]
    places += [(f.row, f.offset) for f in term.of(PositionOrder)]
    return places[0] if len(places) == 1 else None


def _at_offset(term: Term, offset: int) -> Term:
    orders = (
        replace(f, offset=offset) if isinstance(f, PositionOrder) else f for f in term.factors
    )
    return Term(term.coefficient, tuple(orders))


def rate_falls(term: Term) -> bool:
    """Return whether a running sum never rises: what is added at each position is not above 0."""
    signs = [sign_of(f) for f in term.of(Leaf)]
    # The sign of a product is the product of the signs; a factor of unknown sign has 0.
    return math.prod(signs) * term.coefficient < 0


def clip(a: Form, *limits: Form) -> Form | None:
    """Return max(t - s, 0) of positions clipped at zero from below."""
    return rectify(a) if len(limits) == 1 and limits[0].scalar == 0 else None


def maximum(a: Form, *others: Form) -> Form | None:
    """Return max(t - s, 0) of positions and a number."""
    if len(others) != 1:
        return None
    return rectify(a) if others[0].scalar == 0 else rectify(others[0]) if a.scalar == 0 else None
