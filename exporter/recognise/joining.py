"""Terms that are equal up to the names of what is summed over, and sums of terms that are one term."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from linexport.recognise.axes import Axis, Index
from linexport.recognise.terms import Factor, Form, Nested, Order, Term


def collect(form: Form) -> Form:
    """Like terms added, and sums that are one term in disguise put together."""
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
    """Two terms as fewer, if that is possible."""
    if same(a, b, free):
        total = a.coefficient + b.coefficient
        if math.isnan(total):
            return None
        return [Term(total, a.factors)] if total else []
    for x, y in ((a, b), (b, a)):
        for rule in (_without, _exclusive, _blocks):
            joined = rule(x, y, free)
            if joined is not None:
                return [joined]
    return None


def _without(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """X - [s <= t] X = [s > t] X, and [s <= t] X + [s > t] X = X."""
    for order in b.of(Order):
        rest = Term(b.coefficient, tuple(f for f in b.factors if f is not order))
        if a.coefficient == -b.coefficient and same(a, rest, free) and order.axes <= free | a.axes:
            return Term(a.coefficient, (*rest.factors, order.complement()))
        if a.coefficient == b.coefficient:
            flipped = Term(b.coefficient, (*rest.factors, order.complement()))
            if same(a, flipped, free):
                return rest
    return None


def _exclusive(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_s [s <= t] X_s - X_t = sum_s [s < t] X_s."""
    if a.coefficient != -b.coefficient:
        return None
    for order in a.of(Order):
        bound = [x for x in order.column if x not in free]
        if order.offset or len(bound) != len(order.column) or len(order.row) != len(bound):
            continue
        at_row = {s: (t,) for s, t in zip(order.column, order.row, strict=True)}
        rest = Term(1.0, tuple(f for f in a.factors if f is not order)).rename(at_row)
        if same(rest, b, free):
            strict = replace(order, offset=-1)
            kept = tuple(f for f in a.factors if f is not order)
            return Term(a.coefficient, (*kept, strict))
    return None


def _blocks(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_{m,s} [m < n] X_{m,s} + sum_s [s <= t] X_{n,s} = sum [(m,s) <= (n,t)] X_{m,s}.

    Blocks before this one, and this one up to the diagonal.
    """
    if a.coefficient != b.coefficient:
        return None
    for outer in a.of(Order):
        if outer.offset != -1 or free & set(outer.column) or len(outer.row) != len(outer.column):
            continue
        here = dict(zip(outer.column, ((t,) for t in outer.row), strict=True))
        rest = Term(1.0, tuple(f for f in a.factors if f is not outer))
        for inner in b.of(Order):
            if inner.offset or free & set(inner.column):
                continue
            below = Term(1.0, tuple(f for f in b.factors if f is not inner))
            found = match(rest.rename(here), below, free)
            if found is None:
                continue
            back = {v: k for k, v in found.items()}
            column = tuple(back.get(s, s) for s in inner.column)
            order = Order((*outer.row, *inner.row), (*outer.column, *column))
            return Term(a.coefficient, (*rest.factors, order))
    return None


def same(a: Term, b: Term, free: frozenset[Axis]) -> bool:
    """Equal up to coefficients and the names of what is summed over."""
    return match(a, b, free) is not None


def match(a: Term, b: Term, free: frozenset[Axis]) -> dict[Axis, Axis] | None:
    """The labels of ``b`` for those of ``a`` under which the terms are the same product.

    Free labels stand for themselves.
    """
    if len(a.factors) != len(b.factors) or a.key() != b.key():
        return None
    return next(_matches(list(a.factors), list(b.factors), {x: x for x in free}), None)


def _matches(
    a: list[Factor], b: list[Factor], known: dict[Axis, Axis]
) -> Iterator[dict[Axis, Axis]]:
    if not a:
        yield known
        return
    first, rest = a[0], a[1:]
    for place, other in enumerate(b):
        if first.key() != other.key():
            continue
        extended = _paired(first.indices(), other.indices(), known)
        if extended is None:
            continue
        if (
            isinstance(first, Nested)
            and isinstance(other, Nested)
            and not _same_inside(first, other, extended)
        ):
            continue
        yield from _matches(rest, b[:place] + b[place + 1 :], extended)


def _same_inside(a: Nested, b: Nested, known: dict[Axis, Axis]) -> bool:
    renamed_ = a.inner.rename({x: (y,) for x, y in known.items()})
    left = list(b.inner.terms)
    for term in renamed_.terms:
        found = next(
            (t for t in left if t.coefficient == term.coefficient and same(term, t, b.inner.axes)),
            None,
        )
        if found is None:
            return False
        left.remove(found)
    return not left


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
            elif q in taken or p.size != q.size:
                return None
            else:
                result[p] = q
                taken.add(q)
    return result
