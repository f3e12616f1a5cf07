"""Products of two tensors of tokens, which are one tensor for most purposes, as their factors.

sum_s [s <= t] x_s  /  sum_s [s <= t] k_s      with x_s = k_s v_s
"""

from __future__ import annotations

from dataclasses import replace

from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import IDENTITY, Factor, Form, Leaf, Nested, Term


def with_factors(e: Evaluator, form: Form) -> Form:
    """Return a quotient with products as factors where its denominator has one of them."""
    if len(form.terms) != 1:
        return form
    (term,) = form.terms
    over = [f for f in term.of(Nested) if f.kind == "one over"]
    if len(over) != 1:
        return form
    below = {f.tensor.name for t in over[0].inner.terms for f in _leaves(t)}
    coefficient, factors = term.coefficient, list[Factor]()
    for factor in term.factors:
        found = _factors(e, factor, below) if isinstance(factor, Leaf) else None
        coefficient *= found.coefficient if found else 1.0
        factors += found.factors if found else [factor]
    return replace(form, terms=(Term(coefficient, tuple(factors)),))


def _leaves(term: Term) -> list[Leaf]:
    exps = [t for f in term.of(Nested) if f.kind == "exp" for t in f.inner.terms]
    return [*term.of(Leaf), *(f for t in exps for f in t.of(Leaf))]


def _factors(e: Evaluator, leaf: Leaf, targets: set[str]) -> Term | None:
    """Return a leaf as a product if one of its factors reads a target tensor; None otherwise."""
    product = e.products.get(leaf.tensor.name) if leaf.function == IDENTITY else None
    if product is None or len(product.dims) != len(leaf.dims):
        return None
    product, names = product.fresh(), dict[Axis, Index]()
    for own, index in zip(product.dims, leaf.dims, strict=True):
        if len(own) != len(index):
            return None
        names.update({a: (b,) for a, b in zip(own, index, strict=True)})
    (term,) = product.rename(names).terms
    return term if any(f.tensor.name in targets for f in term.of(Leaf)) else None
