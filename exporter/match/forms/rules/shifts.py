"""Sums over earlier positions, delayed.

    zeros(k) ++ x[0 : T - k]      is x_{t-k};  of x_t = sum_s [s <= t] y_s,  sum_s [s <= t - k] y_s

in either order: padded or concatenated in front and cut at the end, or cut and padded. Of a tensor
of the graph the values at earlier positions are unknown, so its shift is opaque.
"""

from __future__ import annotations

from dataclasses import replace

from linexport.graph.monomials import ONE, Size
from linexport.match.forms import algebra
from linexport.match.forms.axes import Index, size_of
from linexport.match.forms.evaluate import Along, Behind, Evaluator, Late
from linexport.match.forms.rules.leading_zeros import first_of_sums
from linexport.match.forms.terms import Factor, Form, Nested, PositionOrder, Term
from linexport.match.forms.unify import collect

LAST = Size(-1)


def cut(e: Evaluator, given: str, made: str, place: int, form: Form, end: Size) -> Form | None:
    """Return the form of a value without its last positions, if it was delayed before.

    Args:
        e: notes the result, where it was not.
        given: name of the value that is cut.
        made: name of the result.
        place: the dim.
        form: of the value that is cut.
        end: of the slice that begins at 0.
    """
    before = e.delayed.get(given)
    if before is not None and before.place == place:
        ends = (LAST, size_of(before.form.dims[place]))
        return delayed(before.form, place, 1) if end in ends else None
    late, whole = e.late.get(given), size_of(form.dims[place])
    if late is not None and late.place == place:
        stated = end in (Size(-late.by), size_of(late.form.dims[place]))
        return delayed(late.form, place, late.by) if stated else None
    if end.known is not None and end.known < -1:
        e.shortened[made] = Late(place, form, -end.known)
        return None
    if end == LAST or end + ONE == whole:
        summed = first_of_sums(e, form, place)
        if summed is not None:
            return summed
        e.shortened[made] = Late(place, form, 1)
    return None


def put_zeros_in_front(
    e: Evaluator, given: str, made: str, place: int, form: Form, count: int
) -> Form | None:
    """Return the form of a value with zeros in front, if as many positions were cut before."""
    before = e.shortened.get(given)
    if before is not None and (before.place, before.by) == (place, count):
        return delayed(before.form, place, count)
    if count > 1:
        e.late[made] = Late(place, form, count)
        return None
    e.delayed[made] = Along(place, form)
    front = algebra.constant(0.0, tuple(() if p == place else i for p, i in enumerate(form.dims)))
    e.behind[made] = Behind(place, front, form)
    return None


def delayed(form: Form, place: int, by: int) -> Form | None:
    """Return x_{t-k} of a sum over positions up to t, zero before the first; None of others."""
    return delayed_along(form, form.dims[place], by)


def delayed_along(form: Form, index: Index, by: int = 1) -> Form | None:
    """``delayed`` along a dim or a parameter."""
    terms = [_term(term, index, by) for term in form.terms]
    # At t < k nothing is before it, so that every term must have an empty sum there.
    empty = all(any(o.row == index for o in t.of(PositionOrder)) for t in form.terms)
    if not index or not empty or any(term is None for term in terms):
        return None
    return collect(Form(form.dims, tuple(t for t in terms if t is not None)))


def _term(term: Term, index: Index, by: int) -> Term | None:
    factors = [_factor(f, index, by) for f in term.factors]
    known = tuple(f for f in factors if f is not None)
    return Term(term.coefficient, known) if len(known) == len(factors) else None


def _factor(factor: Factor, index: Index, by: int) -> Factor | None:
    if not factor.axes & set(index):
        return factor
    if isinstance(factor, PositionOrder) and factor.row == index:
        # [s <= t + c] at t - k is [s <= t - k + c].
        return replace(factor, offset=factor.offset - by)
    if isinstance(factor, Nested):
        terms = [_term(term, index, by) for term in factor.inner.terms]
        known = tuple(t for t in terms if t is not None)
        return (
            replace(factor, inner=replace(factor.inner, terms=known)) if None not in terms else None
        )
    return None
