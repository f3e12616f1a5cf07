"""Attention whose scores pass through a function before they meet the values: not linear.

    out = sum_s f(q k^T)[t,s] v[s,e]      f = softmax, exp, relu, ...

Such graphs are left as they are; this says why.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.manifest.rewriting import SOFTMAX_ATTENTION
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Form, Leaf, Nested

ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
"""Operators that are softmax attention as a whole."""


def not_linear_reason(e: Evaluator, node: gs.Node, form: Form) -> str | None:
    """Why the output of a node is attention, but no linear one; None where it is neither."""
    if node.op in ATTENTION:
        return f"{node.op} is {SOFTMAX_ATTENTION}"
    if len(form.terms) != 1:
        return None
    term = form.terms[0]
    leaves = [f for f in term.of(Leaf) if f.axes]
    bound = term.axes - form.axes
    if bound and (reason := exponent_reason(e, form)):
        return reason
    for scores in leaves:
        others = [f for f in leaves if f is not scores]
        summed = scores.axes & bound
        if not summed or not any(f.axes & summed for f in others):
            continue
        between = _between(e, scores.tensor)
        if between is not None:
            kind = SOFTMAX_ATTENTION if between == "Softmax" else "no sum over keys"
            return f"its scores pass through {between} before they meet the values: {kind}"
    return None


def exponent_reason(e: Evaluator, form: Form) -> str | None:
    """Return that exp is taken of scores; None where it is not."""
    if len(form.terms) != 1:
        return None
    for exponent in (f for f in form.terms[0].of(Nested) if f.kind == "exp"):
        inside = replace(form, dims=exponent.inner.dims)
        if any(_is_product(e, inside, t.of(Leaf)) for t in exponent.inner.terms):
            return f"exp is taken of query times key: {SOFTMAX_ATTENTION}"
    return None


def _between(e: Evaluator, tensor: gs.Tensor) -> str | None:
    """The operator between query times key and this tensor; Softmax, if it is among several.

    What queries and keys pass through themselves is behind that product.
    """
    found, pending, seen = None, [tensor], set[str]()
    while pending:
        here = pending.pop()
        node = e.opaque_over.get(here.name)
        if node is None or here.name in seen:
            continue
        seen.add(here.name)
        for source in node.inputs:
            form = e.form(source)
            if form is not None and any(_is_product(e, form, t.of(Leaf)) for t in form.terms):
                found = node.op if found is None else found
            else:
                pending.append(source)
    if found is None:
        return None
    operators = [e.opaque_over[name].op for name in seen]
    return "Softmax" if "Softmax" in operators else found


def _is_product(e: Evaluator, form: Form, leaves: list[Leaf]) -> bool:
    """A sum over channels of two tensors that have positions of their own.

    A product with a stored tensor is a projection, such as that of gates.
    """
    own_values = [leaf for leaf in leaves if not e.is_weight(leaf.tensor)]
    for a in own_values:
        for b in own_values:
            own = a.axes & form.axes - b.axes, b.axes & form.axes - a.axes
            if a is not b and all(own) and a.axes & b.axes - form.axes:
                return True
    return False
