"""Kernels with cosines and sines of positions, which are followed where a convolution reads them.

    cos(b t), sin(b t)        factors as exp(a t) is, b of weights alone
    cos(b (t - s))            cos of b t - b s
    cos(b max(t - s, 0))      [s <= t] cos(b t - b s) + [s > t],  as the argument is 0 where s > t

and where a product of matrices reads one by two positions, such as complex powers under a triangle:

    sum_s [s <= t] exp(a (t - s)) cos(b (t - s)) u_s

Anywhere else such a cosine is a tensor: followed, the rotary embeddings of queries and keys would
be sums of products of them, of which no scores are left to be seen.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import is_of_weights, producer
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.evaluate import RULES, Evaluator
from linexport.match.forms.terms import TURNS, Form, Iota, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import equal_up_to_names

KINDS = {"Cos": "cos", "Sin": "sin"}


def kernel_form(e: Evaluator, tensor: gs.Tensor, form: Form) -> Form:
    """Return the form of a kernel of weights and positions with its cosines and sines followed.

    Args:
        e: of the graph.
        tensor: the kernel, or anything else, whose form is then what it was.
        form: as the evaluator has it.
    """
    if not is_of_weights(tensor):
        return form
    return _followed(e, tensor, {}) or form


def matrix_form(e: Evaluator, tensor: gs.Tensor, form: Form) -> Form:
    """Return the form of a triangle of powers with its cosines and sines followed.

    Args:
        e: of the graph.
        tensor: the triangle, or anything else, whose form is then what it was.
        form: as the evaluator has it.
    """
    sizes = [size for size in map(size_of, form.dims) if size.known is None]
    # A matrix of two positions has one dynamic size twice.
    if len(sizes) == len(set(sizes)):
        return form
    followed = kernel_form(e, tensor, form)
    return followed if all(map(_turns_between, followed.terms)) else form


def _turns_between(term: Term) -> bool:
    """Return whether a product has a cosine or sine of two positions, of which one is not later."""
    orders = term.of(PositionOrder)
    turns = [f for f in term.of(Nested) if f.kind in TURNS]
    return len(orders) == len(turns) == 1 and orders[0].axes <= turns[0].axes


def _followed(e: Evaluator, tensor: gs.Tensor, known: dict[str, Form | None]) -> Form | None:
    """Return the form of a tensor that cosines and sines are factors of; None of any other."""
    if tensor.name not in known:
        node, form = producer(tensor), None
        if node is not None and node.op in KINDS:
            form = _turn(e, node)
        elif node is not None and node.op in RULES:
            given = {t.name: _followed(e, t, known) for t in node.inputs if not t.is_empty()}
            changed = {name: f for name, f in given.items() if f is not None}
            form = e.made_of(node, changed) if changed else None
        known[tensor.name] = form
    return known[tensor.name]


def _turn(e: Evaluator, node: gs.Node) -> Form | None:
    """Return cos or sin of b t or of b (t - s), of stored numbers b, as one factor."""
    form = e.form(node.inputs[0])
    if form is None or len(form.terms) not in (1, 2):
        return None
    masks = tuple(form.terms[0].of(PositionOrder))
    # A mask whose positions are summed over is part of a running sum.
    shared = all(tuple(term.of(PositionOrder)) == masks for term in form.terms)
    if len(masks) > 1 or not shared or any(not mask.axes <= form.axes for mask in masks):
        return None
    terms = tuple(_without(term, masks) for term in form.terms)
    if not all(_is_multiple(e, term, form) for term in terms):
        return None
    if len(terms) == 2 and not _are_opposite(*terms, form.axes):
        return None
    # cos(-x) = cos(x), and sin(-x) = -sin(x): equal angles are of one sign.
    kind, negative = KINDS[node.op], terms[0].coefficient < 0
    if negative:
        terms = tuple(term.scaled(-1.0) for term in terms)
    inner = Form(tuple((a,) for a in form.axes), terms)
    sign = -1.0 if negative and kind == "sin" else 1.0
    turned = Form(form.dims, (Term(sign, (algebra.nested(kind, inner), *masks)),))
    if not masks or kind == "sin":
        return turned
    # cos(m x) = m cos(x) + 1 - m, where m is 0 or 1.
    rest = algebra.complement(Form(form.dims, (Term(1.0, masks),)))
    return rest and algebra.plus(turned, rest)


def _without(term: Term, masks: tuple[PositionOrder, ...]) -> Term:
    return replace(term, factors=tuple(f for f in term.factors if f not in masks))


def _is_multiple(e: Evaluator, term: Term, form: Form) -> bool:
    """Return whether a term is a position times stored numbers."""
    leaves, positions = term.of(Leaf), term.of(Iota)
    plain = len(positions) == 1 and len(leaves) + 1 == len(term.factors) and term.axes <= form.axes
    return plain and all(e.is_weight(f.tensor) for f in leaves)


def _are_opposite(a: Term, b: Term, free: frozenset[Axis]) -> bool:
    """Return whether two multiples of positions are b t and -b s."""
    (t,), (s,) = (term.of(Iota) for term in (a, b))
    if t == s or size_of(t.index) != size_of(s.index) or a.coefficient != -b.coefficient:
        return False
    x, y = (Term(1.0, tuple(term.of(Leaf))) for term in (a, b))
    return equal_up_to_names(x, y, free)


def at_difference(turn: Nested, position: Index, t: Index, s: Index) -> Nested:
    """Return cos or sin of b t - b s, of one of b times a position."""
    (axis,) = position
    (later,), (earlier,) = (turn.inner.rename({axis: index}).terms for index in (t, s))
    axes = tuple((a,) for a in later.axes | earlier.axes)
    return replace(turn, inner=Form(axes, (later, earlier.scaled(-1.0))))
