"""Terms equal up to the names of what is summed over, and sums of terms that are one term."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from linexport.recognise.axes import Axis, Index
from linexport.recognise.terms import Factor, Form, Leaf, Nested, PositionOrder, Term


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
        for rule in (_without, _diagonal, _blocks):
            joined = rule(x, y, free)
            if joined is not None:
                return [joined]
    return None


def _without(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """X - [s <= t] X = [s > t] X, and [s <= t] X + [s > t] X = X."""
    for order in b.of(PositionOrder):
        rest = Term(b.coefficient, tuple(f for f in b.factors if f is not order))
        opposite = math.isclose(a.coefficient, -b.coefficient)
        if opposite and same(a, rest, free) and order.axes <= free | a.axes:
            return Term(a.coefficient, (*rest.factors, order.complement()))
        if math.isclose(a.coefficient, b.coefficient):
            flipped = Term(b.coefficient, (*rest.factors, order.complement()))
            if same(a, flipped, free):
                return rest
    return None


def _diagonal(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_s [s <= t] X_s - X_t = sum_s [s < t] X_s, and the reverse."""
    sign = next((s for s in (-1, 1) if math.isclose(a.coefficient, s * b.coefficient)), 0)
    for order in a.of(PositionOrder):
        bound = [x for x in order.column if x not in free]
        if len(bound) != len(order.column) or len(order.row) != len(bound):
            continue
        if (order.offset, sign) not in ((0, -1), (-1, 1)):
            continue
        at_row = {s: (t,) for s, t in zip(order.column, order.row, strict=True)}
        others = tuple(f for f in a.factors if f is not order)
        rest = without_inverses(Term(1.0, others).rename(at_row))
        if same(rest, b, free):
            moved = replace(order, offset=order.offset + sign)
            return Term(a.coefficient, (*others, moved))
    return None


def _blocks(a: Term, b: Term, free: frozenset[Axis]) -> Term | None:
    """sum_{m,s} [m < n] X_{m,s} + sum_s [s <= t] X_{n,s} = sum [(m,s) <= (n,t)] X_{m,s}.

    Blocks before this one, and this one up to the diagonal.
    """
    if not math.isclose(a.coefficient, b.coefficient):
        return None
    for outer in a.of(PositionOrder):
        if outer.offset != -1 or free & set(outer.column) or len(outer.row) != len(outer.column):
            continue
        here = dict(zip(outer.column, ((t,) for t in outer.row), strict=True))
        rest = Term(1.0, tuple(f for f in a.factors if f is not outer))
        for inner in b.of(PositionOrder):
            if inner.offset or free & set(inner.column):
                continue
            below = Term(1.0, tuple(f for f in b.factors if f is not inner))
            found = match(rest.rename(here), below, free)
            if found is None:
                continue
            back = {v: k for k, v in found.items()}
            column = tuple(back.get(s, s) for s in inner.column)
            order = PositionOrder((*outer.row, *inner.row), (*outer.column, *column))
            return Term(a.coefficient, (*rest.factors, order))
    return None


def without_inverses(term: Term) -> Term:
    """Without exps that cancel."""
    exps = [f for f in term.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    for first in exps:
        for second in (*exps, *term.of(Leaf)):
            if _inverse(first, second):
                left = tuple(f for f in term.factors if f is not first and f is not second)
                return without_inverses(Term(term.coefficient, left))
    return term


def _inverse(exp: Nested, other: Nested | Leaf) -> bool:
    """exp(a) exp(-a) = 1, and x exp(-log x) = 1."""
    a = exp.inner.terms[0]
    if isinstance(other, Leaf):
        logarithm = replace(other, function=("Log", (), other.function))
        return a == Term(-1.0, (logarithm,))
    b = other.inner.terms[0]
    return a.coefficient == -b.coefficient and same(a, b, exp.axes | other.axes)


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
    """Inner sums: what they sum over has no meaning outside, so only free labels are kept."""
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
            elif q in taken or p.size != q.size:
                return None
            else:
                result[p] = q
                taken.add(q)
    return result
