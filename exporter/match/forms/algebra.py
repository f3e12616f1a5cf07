"""Sums and products of normal forms, elementwise and over dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.match.forms.axes import Axis, Index, fresh, unify
from linexport.match.forms.sign_analysis import sign_of
from linexport.match.forms.terms import (
    MAX_FACTORS,
    MAX_NESTED,
    MAX_TERMS,
    Count,
    Factor,
    Form,
    Leaf,
    Nested,
    PositionOrder,
    Term,
)
from linexport.match.forms.unify import collect


def leaf_form(tensor: gs.Tensor, shape: Sequence[Size]) -> Form:
    """Return the form of a tensor of the graph: one leaf, every dim a label of its own."""
    dims = tuple(fresh(size) for size in shape)
    return Form(dims, (Term(1.0, (Leaf(tensor, dims),)),))


def constant(value: float, dims: tuple[Index, ...] = ()) -> Form:
    """Return the form that is one number everywhere."""
    return Form(dims, (Term(value),) if value else ())


def broadcast(a: Form, b: Form) -> tuple[Form, Form, tuple[Index, ...]] | None:
    """Two forms with their labels shared, as NumPy aligns their dims, and the dims of a result."""
    # NumPy aligns dims at the end; a dim of size 1, such as a missing one, is the empty index.
    rank = max(len(a.dims), len(b.dims))
    a = replace(a, dims=((),) * (rank - len(a.dims)) + a.dims)
    b = replace(b, dims=((),) * (rank - len(b.dims)) + b.dims)
    for place in range(rank):
        x, y = a.dims[place], b.dims[place]
        if x and y:
            # Both run over one position at a time, so they are one label. Labels of a form have no
            # meaning outside it, so renaming them changes neither tensor.
            shared = unify(x, y)
            if shared is None:
                return None
            a, b = a.rename(shared), b.rename(shared)
    return a, b, tuple(x or y for x, y in zip(a.dims, b.dims, strict=True))


def plus(a: Form, b: Form) -> Form | None:
    """Elementwise sum."""
    aligned = broadcast(a, b)
    if aligned is None:
        return None
    x, y, dims = aligned
    return collect(Form(dims, x.terms + y.terms))


def times(a: Form, b: Form) -> Form | None:
    """Elementwise product."""
    aligned = broadcast(a, b)
    if aligned is None:
        return None
    x, y, dims = aligned
    # (sum_i S_i) (sum_j T_j) = sum_ij S_i T_j: what the two sum over has different labels, so the
    # sums of a product are the product of the sums.
    products = [multiplied(s, t) for s in x.terms for t in y.terms]
    return collect(Form(dims, tuple(p for p in products if p is not None)))


def multiplied(a: Term, b: Term) -> Term | None:
    """The product of two terms whose bound labels differ; None if it is zero."""
    factors: list[Factor] = list(a.factors)
    for factor in b.factors:
        if isinstance(factor, PositionOrder):
            narrower = _narrowed(factors, factor)
            if narrower is None:
                return None
            factors = narrower
            continue
        # A size times one over it is 1.
        if isinstance(factor, Count) and replace(factor, power=-factor.power) in factors:
            factors.remove(replace(factor, power=-factor.power))
            continue
        factors.append(factor)
    return Term(a.coefficient * b.coefficient, tuple(factors))


def _narrowed(factors: list[Factor], order: PositionOrder) -> list[Factor] | None:
    """Return factors times an order of positions; None where no position satisfies both."""
    kept = list[Factor]()
    for factor in factors:
        if isinstance(factor, PositionOrder):
            # No position is both up to t and after it: [s <= t] [t <= s - 1] = 0.
            opposite = (factor.row, factor.column) == (order.column, order.row)
            if opposite and factor.offset + order.offset < 0:
                return None
            # [s <= t] [s <= t - 1] = [s <= t - 1], and the square of either is itself.
            if (factor.row, factor.column) == (order.row, order.column):
                order = replace(order, offset=min(order.offset, factor.offset))
                continue
        kept.append(factor)
    return [*kept, order]


def summed(form: Form, places: Sequence[int], keep: bool) -> Form:
    """Return the sum over the dims at these places, which ``keep`` leaves with size 1."""
    gone = frozenset(a for p in places for a in form.dims[p])
    terms = []
    for term in form.terms:
        lost = [a for a in gone if a not in term.axes]
        # The sum of n equal numbers is n times one of them. Any other label is summed over from now
        # on because it is not a dim any more, which is what a term means.
        for axis in lost:
            known = axis.size.known
            count = Term(float(known)) if known is not None else Term(1.0, (Count(axis.size),))
            scaled = multiplied(term, count)
            assert scaled is not None
            term = scaled
        terms.append(term)
    dims = (
        tuple(() if p in places else i for p, i in enumerate(form.dims))
        if keep
        else tuple(i for p, i in enumerate(form.dims) if p not in places)
    )
    return collect(Form(dims, tuple(terms)))


def reasonable(form: Form) -> bool:
    """Return whether a form is small enough to be worth following."""
    return (
        len(form.terms) <= MAX_TERMS
        and all(len(t.factors) <= MAX_FACTORS for t in form.terms)
        and form.nested <= MAX_NESTED
    )


def exponential(form: Form) -> Form | None:
    """Return exp of a sum as the product of exps; zero where a term is -inf times a mask."""
    result = constant(1.0, form.dims)
    for term in (part for whole in form.terms for part in _halves(whole, form.axes)):
        # exp(x + y) = exp(x) exp(y).
        factor = _exponential(term, form)
        joined = None if factor is None else times(result, factor)
        if joined is None:
            return None
        result = joined
    return result


def _exponential(term: Term, form: Form) -> Form | None:
    if not term.factors:
        return constant(math.exp(term.coefficient), form.dims)
    only = term.factors[0]
    if isinstance(only, Nested) and only.kind == "log" and len(term.factors) == 1:
        # exp(log X) = X and exp(-log X) = 1 / X for positive X, and a logarithm of anything else is
        # NaN on both sides.
        whole = Form(form.dims, only.inner.terms)
        return {1.0: whole, -1.0: one_over(whole)}.get(term.coefficient)
    if math.isinf(term.coefficient):
        # exp(-inf m) is 0 where the mask m is 1 and, with 0 inf = 0, 1 where m is 0: that is 1 - m.
        # Behind the mask any number that is not positive will do, such as inf times a log decay.
        mask = next(iter(term.of(PositionOrder)), only)
        others = [f for f in term.factors if f is not mask]
        signs = [sign_of(f) if isinstance(f, Leaf) else 0 for f in others]
        falls = math.prod(signs) * term.coefficient < 0
        if not falls or not isinstance(mask, PositionOrder | Leaf):
            return None
        return complement(Form(form.dims, (Term(1.0, (mask,)),)))
    orders = [o for o in term.of(PositionOrder) if o.axes <= form.axes]
    if orders:
        # With m = [s <= t]: exp(m x) = m exp(x) + (1 - m), as m is 1 or 0. Allowed only where both
        # positions are dims: one that is summed over is inside the exponent.
        rest = Term(term.coefficient, tuple(f for f in term.factors if f is not orders[0]))
        inside = _exponential(rest, form)
        kept = inside and times(inside, Form(form.dims, (Term(1.0, (orders[0],)),)))
        gone = Form(form.dims, (Term(1.0, (orders[0].complement(),)),))
        return kept and plus(kept, gone)
    return Form(form.dims, (Term(1.0, (exponent(term, form.axes),)),))


def _halves(term: Term, free: frozenset[Axis]) -> tuple[Term, ...]:
    """Return sum_u [s < u] [u <= t] g_u = [s <= t] (sum_u [u <= t] g_u - sum_u [u <= s] g_u).

    Any other term is returned as it is.
    """
    for first in term.of(PositionOrder):
        for second in term.of(PositionOrder):
            u = second.row
            between = first.column == u and second.offset == -1 and first.offset == 0
            if not between or set(u) & free or not {*first.row, *second.column} <= free:
                continue
            rest = tuple(f for f in term.factors if f is not first and f is not second)
            order = PositionOrder(first.row, second.column)
            since = PositionOrder(second.column, u)
            return (
                Term(term.coefficient, (*rest, order, first)),
                Term(-term.coefficient, (*rest, order, since)),
            )
    return (term,)


def exponent(term: Term, free: frozenset[Axis]) -> Nested:
    """Return exp of one term; of its labels those that are not free are summed over inside."""
    return nested("exp", Form(tuple((a,) for a in free), (term,)))


def nested(kind: str, inner: Form) -> Nested:
    """Return a nested factor whose dims are the labels that its terms depend on."""
    used = frozenset().union(*(t.axes for t in inner.terms))
    return Nested(kind, Form(tuple((a,) for a in inner.axes & used), inner.terms))


def one_over(form: Form) -> Form | None:
    """Return 1 / X; None where X is 0."""
    if not form.terms:
        return None
    # 1 / (a + b) is not a sum of products, and 1 / sum_s is not either: it is a nested factor.
    if len(form.terms) > 1 or not form.terms[0].axes <= form.axes:
        return Form(form.dims, (Term(1.0, (nested("one over", form),)),))
    term, factors = form.terms[0], list[Factor]()
    # 1 / (a b) = (1 / a) (1 / b), factor by factor.
    for factor in term.factors:
        if isinstance(factor, Leaf):
            factors.append(replace(factor, function=("Reciprocal", (), factor.function)))
        elif isinstance(factor, Count):
            factors.append(replace(factor, power=-factor.power))
        elif isinstance(factor, Nested) and factor.kind == "exp":
            # 1 / exp(x) = exp(-x).
            negated = tuple(t.scaled(-1.0) for t in factor.inner.terms)
            factors.append(replace(factor, inner=replace(factor.inner, terms=negated)))
        else:
            # A mask is 0 somewhere, so that it has no reciprocal of its own.
            return Form(form.dims, (Term(1.0, (nested("one over", form),)),))
    return Form(form.dims, (Term(1 / term.coefficient, tuple(factors)),))


def complement(form: Form) -> Form | None:
    """Return 1 - X, where X is 0 or 1."""
    truth = form.leaf.truth if form.leaf is not None else None
    if form.leaf is not None and truth is not None:
        # Of one boolean tensor 1 - x is Not x: a leaf still, which can be a key mask.
        opposite = truth[2] if truth[0] == "Not" else ("Not", (), truth)
        return replace(form, terms=(Term(1.0, (replace(form.leaf, function=opposite),)),))
    return plus(constant(1.0, form.dims), negated(form))


def negated(form: Form) -> Form:
    """Return -X."""
    return Form(form.dims, tuple(t.scaled(-1.0) for t in form.terms))


def counted(size: Size) -> Form:
    """Return the form of a size used as a number."""
    return Form((), (Term(1.0, (Count(size),)),))
