"""Sums and products of normal forms, elementwise and over dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.recognise.axes import Axis, Index, fresh, unify
from linexport.recognise.joining import collect
from linexport.recognise.sizes import Size
from linexport.recognise.terms import (
    MAX_FACTORS,
    MAX_TERMS,
    Count,
    Factor,
    Form,
    Leaf,
    Nested,
    PositionOrder,
    Term,
)


def leaf_form(tensor: gs.Tensor, shape: Sequence[Size]) -> Form:
    """A tensor of the graph as it is."""
    dims = tuple(fresh(size) for size in shape)
    return Form(dims, (Term(1.0, (Leaf(tensor, dims),)),))


def constant(value: float, dims: tuple[Index, ...] = ()) -> Form:
    """One number everywhere."""
    return Form(dims, (Term(value),) if value else ())


def broadcast(a: Form, b: Form) -> tuple[Form, Form, tuple[Index, ...]] | None:
    """Two forms with their labels shared, as NumPy aligns their dims, and the dims of a result."""
    rank = max(len(a.dims), len(b.dims))
    a = replace(a, dims=((),) * (rank - len(a.dims)) + a.dims)
    b = replace(b, dims=((),) * (rank - len(b.dims)) + b.dims)
    for place in range(rank):
        x, y = a.dims[place], b.dims[place]
        if x and y:
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
    products = [multiplied(s, t) for s in x.terms for t in y.terms]
    return collect(Form(dims, tuple(p for p in products if p is not None)))


def multiplied(a: Term, b: Term) -> Term | None:
    """The product of two terms whose bound labels differ; None if it is zero."""
    factors: list[Factor] = list(a.factors)
    for factor in b.factors:
        if isinstance(factor, PositionOrder):
            if factor in factors:
                continue
            if factor.complement() in factors:
                return None
        if isinstance(factor, Count) and replace(factor, power=-factor.power) in factors:
            factors.remove(replace(factor, power=-factor.power))
            continue
        factors.append(factor)
    return Term(a.coefficient * b.coefficient, tuple(factors))


def summed(form: Form, places: Sequence[int], keep: bool) -> Form:
    """Sum over dims."""
    gone = frozenset(a for p in places for a in form.dims[p])
    terms = []
    for term in form.terms:
        lost = [a for a in gone if a not in term.axes]
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
    """Small enough to be worth following."""
    return len(form.terms) <= MAX_TERMS and all(len(t.factors) <= MAX_FACTORS for t in form.terms)


def exponential(form: Form) -> Form | None:
    """exp of a sum as the product of exps; where a term is -inf times a mask, zero."""
    result = constant(1.0, form.dims)
    for term in form.terms:
        factor = _exponential(term, form)
        joined = None if factor is None else times(result, factor)
        if joined is None:
            return None
        result = joined
    return result


def _exponential(term: Term, form: Form) -> Form | None:
    if not term.factors:
        return constant(math.exp(term.coefficient), form.dims)
    if term.coefficient == -math.inf:
        only = term.factors[0]
        if len(term.factors) > 1 or not isinstance(only, PositionOrder | Leaf):
            return None
        return complement(Form(form.dims, (Term(1.0, (only,)),)))
    orders = [o for o in term.of(PositionOrder) if o.axes <= form.axes]
    if orders:
        rest = Term(term.coefficient, tuple(f for f in term.factors if f is not orders[0]))
        inside = _exponential(rest, form)
        kept = inside and times(inside, Form(form.dims, (Term(1.0, (orders[0],)),)))
        gone = Form(form.dims, (Term(1.0, (orders[0].complement(),)),))
        return kept and plus(kept, gone)
    return Form(form.dims, (Term(1.0, (exponent(term, form.axes),)),))


def exponent(term: Term, free: frozenset[Axis]) -> Nested:
    """exp of one term, some labels of which are free."""
    return nested("exp", Form(tuple((a,) for a in free), (term,)))


def nested(kind: str, inner: Form) -> Nested:
    """A nested factor whose dims are the labels it really depends on."""
    used = frozenset().union(*(t.axes for t in inner.terms))
    return Nested(kind, Form(tuple((a,) for a in inner.axes & used), inner.terms))


def logarithm(leaf: Leaf) -> Leaf:
    """log of an entry; log of exp is nothing."""
    if leaf.function[0] == "Exp":
        return replace(leaf, function=leaf.function[2])
    return replace(leaf, function=("Log", (), leaf.function))


def one_over(form: Form) -> Form | None:
    """The reciprocal."""
    if not form.terms:
        return None
    if len(form.terms) > 1 or not form.terms[0].axes <= form.axes:
        return Form(form.dims, (Term(1.0, (nested("one over", form),)),))
    term, factors = form.terms[0], list[Factor]()
    for factor in term.factors:
        if isinstance(factor, Leaf):
            factors.append(replace(factor, function=("Reciprocal", (), factor.function)))
        elif isinstance(factor, Count):
            factors.append(replace(factor, power=-factor.power))
        elif isinstance(factor, Nested) and factor.kind == "exp":
            negated = tuple(t.scaled(-1.0) for t in factor.inner.terms)
            factors.append(replace(factor, inner=replace(factor.inner, terms=negated)))
        else:
            return Form(form.dims, (Term(1.0, (nested("one over", form),)),))
    return Form(form.dims, (Term(1 / term.coefficient, tuple(factors)),))


def complement(form: Form) -> Form | None:
    """1 - X, where X is 0 or 1."""
    truth = form.leaf.truth if form.leaf is not None else None
    if form.leaf is not None and truth is not None:
        opposite = truth[2] if truth[0] == "Not" else ("Not", (), truth)
        return replace(form, terms=(Term(1.0, (replace(form.leaf, function=opposite),)),))
    return plus(constant(1.0, form.dims), Form(form.dims, tuple(t.scaled(-1) for t in form.terms)))


def counted(size: Size) -> Form:
    """A size as a number."""
    return Form((), (Term(1.0, (Count(size),)),))
