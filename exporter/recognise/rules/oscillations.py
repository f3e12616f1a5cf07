"""Kernels with cosines and sines of positions, which are followed where a convolution reads them.

    cos(b t), sin(b t)        factors as exp(a t) is, b of weights alone
    cos(b (t - s))            cos of b t - b s

Anywhere else such a cosine is a tensor: followed, the rotary embeddings of queries and keys would
be sums of products of them, of which no scores are left to be seen.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.operators import SIZES_ONLY
from linexport.recognise import algebra
from linexport.recognise.axes import Index
from linexport.recognise.evaluate import RULES, Evaluator
from linexport.recognise.terms import Form, Iota, Leaf, Nested, Term

KINDS = {"Cos": "cos", "Sin": "sin"}


def kernel_form(e: Evaluator, tensor: gs.Tensor, form: Form) -> Form:
    """Return the form of a kernel of weights and positions with its cosines and sines followed.

    Args:
        e: of the graph.
        tensor: the kernel, or anything else, whose form is then what it was.
        form: as the evaluator has it.
    """
    if not _is_of_weights(tensor):
        return form
    return _followed(e, tensor, {}) or form


def _is_of_weights(tensor: gs.Tensor) -> bool:
    """Return whether a tensor depends on no input of the graph but by its sizes."""
    seen, pending = set[int](), [tensor]
    while pending:
        for node in pending.pop().inputs or [None]:
            if node is None:
                return False
            if id(node) not in seen and node.op not in SIZES_ONLY:
                seen.add(id(node))
                pending += [
                    t for t in node.inputs if not isinstance(t, gs.Constant) and not t.is_empty()
                ]
    return True


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
    """Return cos(b t) or sin(b t) of stored numbers b as one factor."""
    form = e.form(node.inputs[0])
    if form is None or len(form.terms) != 1:
        return None
    (term,) = form.terms
    leaves, positions = term.of(Leaf), term.of(Iota)
    plain = len(positions) == 1 and len(leaves) + 1 == len(term.factors) and term.axes <= form.axes
    if not plain or not all(e.is_weight(f.tensor) for f in leaves):
        return None
    # cos(-x) = cos(x), and sin(-x) = -sin(x): equal angles are of one sign.
    kind, negative = KINDS[node.op], term.coefficient < 0
    angle = term.scaled(-1.0) if negative else term
    inner = Form(tuple((a,) for a in form.axes), (angle,))
    sign = -1.0 if negative and kind == "sin" else 1.0
    return Form(form.dims, (Term(sign, (algebra.nested(kind, inner),)),))


def at_difference(turn: Nested, position: Index, t: Index, s: Index) -> Nested:
    """Return cos or sin of b t - b s, of one of b times a position."""
    (axis,) = position
    (later,), (earlier,) = (turn.inner.rename({axis: index}).terms for index in (t, s))
    axes = tuple((a,) for a in later.axes | earlier.axes)
    return replace(turn, inner=Form(axes, (later, earlier.scaled(-1.0))))
