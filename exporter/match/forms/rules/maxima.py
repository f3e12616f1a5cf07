"""The largest exponent of earlier positions, which stable forms subtract before they take exp.

max_s { G_t - G_s + i_s  where s <= t }   is   log max_s [s <= t] exp(G_t) exp(-G_s) exp(i_s)
softmax_s of the same                     is   exp(..) / sum_s [s <= t] exp(G_t) exp(-G_s) exp(i_s)
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.match.forms import algebra
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.terms import Form, Nested, PositionOrder, Term


@rule("ReduceMax")
def reduce_max(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the maximum over the keys of a triangle of exponents, each of a query or of a key."""
    form, axes = e.form(node.inputs[0]), e.ints(node, 1, "axes")
    if form is None or axes is None or len(axes) != 1:
        return None
    place = axes[0] % len(form.dims)
    weights = _weights(form, place)
    if weights is None:
        return None
    kept = [() if p == place else index for p, index in enumerate(form.dims)]
    left = tuple(index for p, index in enumerate(kept) if p != place)
    # exp increases, so max_s x_s = log max_s exp(x_s).
    largest = algebra.nested("log max", Form(left, weights.terms))
    dims = tuple(kept) if node.attrs.get("keepdims", 1) else left
    return Form(dims, (Term(1.0, (largest,)),))


@rule("Softmax")
def softmax(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the shares of keys of a triangle of exponents; of scores they stay opaque."""
    form = e.form(node.inputs[0])
    place = node.attrs.get("axis", -1)
    weights = None if form is None else _weights(form, place % len(form.dims))
    if form is None or weights is None:
        return None
    # The maximum that a stable softmax subtracts divides numerator and denominator alike.
    total = algebra.summed(weights.fresh(), [place % len(form.dims)], keep=True)
    over = algebra.one_over(total)
    return over and algebra.times(weights, over)


def _weights(form: Form, place: int) -> Form | None:
    """Return exp of exponents, each of a query or of a key, where they are a triangle."""
    weights = algebra.exponential(form) if len(form.terms) > 1 else None
    if weights is None or len(weights.terms) != 1:
        return None
    (product,) = weights.terms
    orders, gone = product.of(PositionOrder), set(form.dims[place])
    exps = [f for f in product.of(Nested) if f.kind == "exp"]
    if len(orders) != 1 or len(exps) + 1 != len(product.factors) or product.coefficient != 1:
        return None
    row, column = set(orders[0].row), set(orders[0].column)
    # Scores depend on both positions: they are another matter.
    if column != gone or any(f.axes & row and f.axes & column for f in exps):
        return None
    return replace(weights, dims=form.dims)
