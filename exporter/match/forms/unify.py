"""Terms equal up to the names of what is summed over, and sums of terms that are one term."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.chunk_powers import in_rates_of
from linexport.match.forms.terms import Factor, Form, Iota, Leaf, Nested, PositionOrder, Term


def collect(form: Form) -> Form:
    """Add like terms, and write sums that equal one term as that term; repeat while any is left."""
    terms: list[Term] = []
    for term in form.terms:
        for place, other in enumerate(terms):
            joined = _joined(other, term, form.axes)
            if joined is not None:
                terms[place : place + 1] = joined
                break
        else:
            terms.append(term)
    if len(terms) == len(form.terms):
        return replace(form, terms=tuple(terms))
    return collect(replace(form, terms=tuple(terms)))


def _joined(a: Term, b: Term, free: frozenset[Axis]) -> list[Term] | None:
    """Return the sum of two terms as one term or none; None where it needs both."""
    # a X + b X = (a + b) X, and nothing where that is 0. inf - inf has no value.
    if equal_up_to_names(a, b, free):
        total = a.coefficient + b.coefficient
        if math.isnan(total):
            return None
        return [Term(total, a.factors)] if total else []
    # A sum does not depend on the order of its terms, so each rule is tried both ways.
    for x, y in ((a, b), (b, a)):
        for rule in (_without, _diagonal, _own, _blocks, _positions):
            joined = rule(x, y, free)
            if joined is not None:
                return [joined]
    return None


def _without(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """X - [s <= t] X = [s > t] X, and [s <= t] X + [s > t] X = X."""
    for order in b.of(PositionOrder):
        rest = Term(b.coefficient, tuple(f for f in b.factors if f is not order))
        opposite = math.isclose(a.coefficient, -b.coefficient)
        # X - [s <= t] X keeps the rest of X: [s > t] X. The term must have both positions already,
        # or the sum over one of them would count X more than once.
        if opposite and equal_up_to_names(a, rest, free) and order.axes <= free | a.axes:
            return Term(a.coefficient, (*rest.factors, order.complement()))
        if math.isclose(a.coefficient, b.coefficient):
            # Every pair of positions is on one side of the diagonal, so the halves make the whole.
            flipped = Term(b.coefficient, (*rest.factors, order.complement()))
            if equal_up_to_names(a, flipped, free):
                return rest
    return None


def _diagonal(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_s [s <= t] X_s - X_t = sum_s [s < t] X_s, and the reverse."""
    sign = next((s for s in (-1, 1) if math.isclose(a.coefficient, s * b.coefficient)), 0)
    for order in a.of(PositionOrder):
        # Only a sum over s has a diagonal to add; row and column need equally many labels, or
        # s = t is not defined.
        bound = [x for x in order.column if x not in free]
        if len(bound) != len(order.column) or len(order.row) != len(bound):
            continue
        if (order.offset, sign) not in ((0, -1), (-1, 1)):
            continue
        # The entry on the diagonal is the summand with t for s; decays exp(G_t - G_s) are 1 there.
        at_row = {s: (t,) for s, t in zip(order.column, order.row, strict=True)}
        others = tuple(f for f in a.factors if f is not order)
        rest = without_inverses(Term(1.0, others).rename(at_row))
        if rest.coefficient == 1 and equal_up_to_names(rest, b, free):
            # [s <= t] and [s < t] = [s <= t - 1] differ in that entry only.
            moved = replace(order, offset=order.offset + sign)
            return Term(a.coefficient, (*others, moved))
    return None


def _own(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_s [s <= t] X_s - sum_s [s < t] X_s = X_t."""
    if not math.isclose(a.coefficient, -b.coefficient):
        return None
    for order in a.of(PositionOrder):
        bound = not free & set(order.column) and len(order.row) == len(order.column)
        if order.offset or not bound or set(order.row) & set(order.column):
            continue
        others = tuple(f for f in a.factors if f is not order)
        earlier = Term(1.0, (*others, replace(order, offset=-1)))
        if equal_up_to_names(earlier, b, free):
            at_row = {s: (t,) for s, t in zip(order.column, order.row, strict=True)}
            return without_inverses(Term(a.coefficient, others).rename(at_row))
    return None


def _blocks(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_{m,s} [m < n] X_{m,s} + sum_s [s <= t] X_{n,s} = sum [(m,s) <= (n,t)] X_{m,s}.

    Blocks before this one, and this one up to the diagonal.
    """
    for outer in a.of(PositionOrder):
        if outer.offset != -1 or free & set(outer.column) or len(outer.row) != len(outer.column):
            continue
        for inner in b.of(PositionOrder):
            # Within the block, up to and including the diagonal.
            if inner.offset or free & set(inner.column):
                continue
            joined = _of_blocks(in_rates_of(b, a, inner.row), outer, b, inner, free)
            if joined is not None:
                return joined
    return None


def _of_blocks(
    a: Term, outer: PositionOrder, b: Term, inner: PositionOrder, free: frozenset[Axis]
) -> Term | None:
    if not math.isclose(a.coefficient, b.coefficient):
        return None
    # The first sum is over strictly earlier blocks m < n; with n for m its summand is that of the
    # block the query is in.
    here = dict(zip(outer.column, ((t,) for t in outer.row), strict=True))
    rest = lagging(Term(1.0, tuple(f for f in a.factors if f is not outer)))
    below = Term(1.0, tuple(f for f in b.factors if f is not inner))
    # Only if both sums have the same summand, one inside and one before the block.
    found = match(without_inverses(rest.rename(here)), below, free)
    if found is None:
        return None
    # Positions (block, place) are ordered by block first, so (m, s) <= (n, t) is m < n, or m = n
    # and s <= t: the two sums have no pair in common and miss none.
    back = {v: k for k, v in found.items()}
    column = tuple(back.get(s, s) for s in inner.column)
    order = PositionOrder((*outer.row, *inner.row), (*outer.column, *column))
    return _of_one_exponent(Term(a.coefficient, (*rest.factors, order)))


def _positions(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """16 n x + t x is x times the position (n, t), where t is in a chunk of 16."""
    chunks, places = a.of(Iota), b.of(Iota)
    if len(chunks) != 1 or len(places) != 1 or chunks[0].axes & places[0].axes:
        return None
    (chunk,), (place,) = chunks, places
    # Of positions that are summed over, the sums of n and of t are not that of both.
    size = size_of(place.index).known if a.axes | b.axes <= free else None
    if size is None or not math.isclose(a.coefficient, size * b.coefficient):
        return None
    x = Term(1.0, tuple(f for f in a.factors if f is not chunk))
    y = Term(1.0, tuple(f for f in b.factors if f is not place))
    if not equal_up_to_names(x, y, free):
        return None
    return Term(b.coefficient, (*y.factors, Iota((*chunk.index, *place.index))))


def _of_one_exponent(term: Term) -> Term:
    """exp(sum over earlier blocks) exp(sum within this block) = exp(sum over what is before)."""
    exps = [f for f in term.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    for place, first in enumerate(exps):
        for second in exps[place + 1 :]:
            axes = tuple((x,) for x in first.axes | second.axes)
            whole = collect(Form(axes, (*first.inner.terms, *second.inner.terms)))
            if len(whole.terms) == 1:
                left = tuple(f for f in term.factors if f is not first and f is not second)
                return _of_one_exponent(replace(term, factors=(*left, Nested("exp", whole))))
    return term


def without_inverses(term: Term) -> Term:
    """Drop pairs of factors whose product is a number, such as exp(a) exp(-a)."""
    exps = [f for f in term.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    for first in exps:
        for second in (*exps, *term.of(Leaf)):
            number = _product(first, second)
            if number is not None:
                left = tuple(f for f in term.factors if f is not first and f is not second)
                return without_inverses(Term(term.coefficient * number, left))
    return term


def lagging(term: Term) -> Term:
    """exp(sum_u [u <= t] x_u) exp(-x_t) = exp(sum_u [u < t] x_u), which a query may lack."""
    exps = [f for f in term.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    for whole in exps:
        order = next(iter(whole.inner.terms[0].of(PositionOrder)), None)
        if order is None or order.offset or len(order.row) != len(order.column):
            continue
        if set(order.column) & whole.axes:  # one x, not a sum of them
            continue
        here = {u: (t,) for u, t in zip(order.column, order.row, strict=True)}
        (sums,) = whole.inner.terms
        newest = Term(sums.coefficient, tuple(f for f in sums.factors if f is not order))
        newest = newest.rename(here)
        for own in exps:
            (exponent,) = own.inner.terms
            if exponent.coefficient == -newest.coefficient and equal_up_to_names(
                exponent, newest, whole.axes | own.axes
            ):
                earlier = replace(order, offset=-1)
                left = replace(
                    sums, factors=tuple(earlier if f is order else f for f in sums.factors)
                )
                before = replace(whole, inner=replace(whole.inner, terms=(left,)))
                rest = tuple(f for f in term.factors if f is not whole and f is not own)
                return lagging(Term(term.coefficient, (*rest, before)))
    return term


def _product(exp: Nested, other: Nested | Leaf) -> float | None:
    """Return exp(a) exp(-a) = 1, x exp(-log x) = 1, x exp(-log(c x)) = 1 / c; None of others."""
    a = exp.inner.terms[0]
    if isinstance(other, Nested):
        b = other.inner.terms[0]
        opposite = a.coefficient == -b.coefficient
        return 1.0 if opposite and equal_up_to_names(a, b, exp.axes | other.axes) else None
    if a == Term(-1.0, (other.logarithm,)):
        return 1.0
    leaf = a.factors[0] if len(a.factors) == 1 else None
    if a.coefficient != -1 or not isinstance(leaf, Leaf):
        return None
    match leaf.function:
        case ("Log", (), ("Mul", (), function, ("const", number, None))) if number:
            same = replace(leaf, function=function) == other
            return 1 / number if same else None
    return None


def equal_up_to_names(a: Term, b: Term, free: frozenset[Axis]) -> bool:
    """Return whether terms are equal up to coefficients and names of what is summed over."""
    return match(a, b, free) is not None


def match(a: Term, b: Term, free: frozenset[Axis]) -> dict[Axis, Axis] | None:
    """The labels of ``b`` for those of ``a`` under which the terms are the same product.

    Free labels stand for themselves.
    """
    # Keys leave labels out: different keys need no search.
    if len(a.factors) != len(b.factors) or a.key() != b.key():
        return None
    return next(_matches(list(a.factors), list(b.factors), {x: x for x in free}), None)


def _matches(
    a: list[Factor], b: list[Factor], known: dict[Axis, Axis]
) -> Iterator[dict[Axis, Axis]]:
    if not a:
        yield known
        return
    # A product does not depend on the order of its factors: the first may pair with any.
    first, rest = a[0], a[1:]
    for place, other in enumerate(b):
        if first.key() != other.key():
            continue
        for extended in _one(first, other, known):
            yield from _matches(rest, b[:place] + b[place + 1 :], extended)


def _one(a: Factor, b: Factor, known: dict[Axis, Axis]) -> Iterator[dict[Axis, Axis]]:
    if isinstance(a, Nested) and isinstance(b, Nested):
        yield from _sums(list(a.inner.terms), list(b.inner.terms), known, a.axes)
        return
    paired = _paired(a.indices(), b.indices(), known)
    if paired is not None:
        yield paired


def _sums(
    a: list[Term], b: list[Term], known: dict[Axis, Axis], free: frozenset[Axis]
) -> Iterator[dict[Axis, Axis]]:
    """Pair the terms of two inner sums; labels summed over inside have no meaning outside."""
    if not a or not b:
        if not a and not b:
            yield known
        return
    for place, other in enumerate(b):
        alike = math.isclose(a[0].coefficient, other.coefficient) and a[0].key() == other.key()
        if not alike:
            continue
        for found in _matches(list(a[0].factors), list(other.factors), known):
            kept = {x: y for x, y in found.items() if x in known or x in free}
            yield from _sums(a[1:], b[:place] + b[place + 1 :], kept, free)


def _paired(
    a: Sequence[Index], b: Sequence[Index], known: dict[Axis, Axis]
) -> dict[Axis, Axis] | None:
    result = dict(known)
    taken = set(result.values())
    if len(a) != len(b):
        return None
    for x, y in zip(a, b, strict=True):
        if len(x) != len(y):
            return None
        for p, q in zip(x, y, strict=True):
            if p in result:
                if result[p] is not q:
                    return None
            # A pairing is one to one, and between labels that run over as many positions.
            elif q in taken or p.size != q.size:
                return None
            else:
                result[p] = q
                taken.add(q)
    return result
