"""Zeros behind a dim, and what is left of a form when they are cut off again.

    sum_{s < P} [s <= t] q[t] k[s] v[s],  t < T    with k or v zero from T on
    = sum_{s < T} [s <= t] q[t] k[s] v[s]

as attention written in chunks has it: padded to whole chunks, and sliced to the length it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index, fresh, size_of
from linexport.match.forms.evaluate import Along, Evaluator, Pieces, rule
from linexport.match.forms.rules import shifts
from linexport.match.forms.rules.leading_zeros import made_of
from linexport.match.forms.terms import (
    IDENTITY,
    Factor,
    Form,
    Iota,
    Leaf,
    Nested,
    PositionOrder,
    Term,
)
from linexport.match.forms.unify import collect

Cuts = Mapping[Index, Index]
"""Padded indices, and what is in their place without the padding."""


@rule("Pad")
def pad(e: Evaluator, node: gs.Node) -> Form | None:
    """Return None, and note the result: a concatenation with a constant, or a zero-padded dim."""
    form, (fronts, ends) = e.form(node.inputs[0]), ends_of(e, node)
    filling = e.values.numbers(node.inputs[2]) if len(node.inputs) > 2 else None
    if len(node.inputs) > 2 and filling is None and not node.inputs[2].is_empty():
        return None
    value = float(filling.item()) if filling is not None else 0.0
    if form is not None and len(fronts) == 1 and value == 0.0:
        return _delay(e, node, form, fronts, ends)
    if form is None or form.leaf is None or len(ends) != 1 or fronts:
        return None
    ((place, end),) = ends.items()
    # With both sizes known the result is a concatenation, whatever the constant. Otherwise the
    # constant must be zero, so that terms vanish there.
    size = size_of(form.dims[place]).known
    if size is not None and end.known is not None and end.known > 0:
        padding = tuple(fresh(end) if p == place else d for p, d in enumerate(form.dims))
        parts = ((size, form), (end.known, algebra.constant(value, padding)))
        e.pieces[node.outputs[0].name] = Pieces(place, parts)
    elif value == 0.0:
        e.padded[node.outputs[0].name] = Along(place, form)
    return None


def _delay(
    e: Evaluator, node: gs.Node, form: Form, fronts: dict[int, Size], ends: dict[int, Size]
) -> Form | None:
    ((place, front),) = fronts.items()
    if front.known is None or front.known < 1:
        return None
    if ends == {place: Size(-front.known)}:
        return shifts.delayed(form, place, front.known)
    if ends:
        return None
    given, made = node.inputs[0].name, node.outputs[0].name
    return shifts.put_zeros_in_front(e, given, made, place, form, front.known)


def ends_of(e: Evaluator, node: gs.Node) -> tuple[dict[int, Size], dict[int, Size]]:
    """Return the padding in front of and behind each padded dim."""
    form = e.form(node.inputs[0])
    given = e.ints(node, 1, "pads") if "pads" in node.attrs else e.values.get(node.inputs[1])
    if form is None or given is None or node.attrs.get("mode", "constant") != "constant":
        return {}, {}
    pads = [n if isinstance(n, Size) else Size(int(n)) for n in np.atleast_1d(given)]
    # First the padding in front of every axis, then the padding behind.
    axes = e.ints(node, 3, "axes") or list(range(len(form.dims)))
    sides = (pads[: len(axes)], pads[len(axes) :])
    front, behind = (
        {a % len(form.dims): n for a, n in zip(axes, side, strict=True) if n != Size(0)}
        for side in sides
    )
    return front, behind


def fills_zero(e: Evaluator, pad: gs.Node) -> bool:
    """Return whether a Pad fills with zeros."""
    filling = pad.inputs[2] if len(pad.inputs) > 2 else None
    return filling is None or filling.is_empty() or e.values.is_zero(filling)


def unpadded(e: Evaluator, form: Form, place: int, size: Size) -> Form | None:
    """The first positions of a dim, where all others are padding; None if they are not."""
    # Cuts are made in all padded dims at once: in a sum over s and a dim t both are padded.
    padded = list(dict.fromkeys(_padded(e, form, size)))
    disjoint = len({a for index in padded for a in index}) == sum(map(len, padded))
    if form.dims[place] not in padded or not disjoint:
        return None
    # Each padded dim gets an axis of the size it had before; dims and terms are rewritten to it.
    cuts = {index: (Axis(size),) for index in padded}
    dims = [_index(index, cuts) for index in form.dims]
    terms = _terms(e, form, cuts)
    if terms is None or any(index is None for index in dims):
        return None
    return collect(Form(tuple(index for index in dims if index is not None), terms))


def _padded(e: Evaluator, form: Form, size: Size) -> Iterator[Index]:
    """Indices along which tensors of that size were padded."""
    for factor in (f for term in form.terms for f in term.factors):
        if isinstance(factor, Nested):
            yield from _padded(e, factor.inner, size)
        elif isinstance(factor, Leaf) and factor.tensor.name in e.padded:
            found = e.padded[factor.tensor.name]
            if size_of(found.form.dims[found.place]) == size:
                yield factor.dims[found.place]


def _terms(e: Evaluator, form: Form, cuts: Cuts) -> tuple[Term, ...] | None:
    terms = [_term(e, term, form.axes, cuts) for term in form.terms]
    return None if None in terms else tuple(t for t in terms if t is not None)


def _term(e: Evaluator, term: Term, outer: frozenset[Axis], cuts: Cuts) -> Term | None:
    """Return a term after the cuts; None where it may not be zero at what they leave out."""
    result, zero = Term(term.coefficient), set[Index]()
    for factor in term.factors:
        if isinstance(factor, Leaf) and factor.tensor.name in e.padded:
            # One factor that is zero from T on makes the product zero there.
            zero.add(factor.dims[e.padded[factor.tensor.name].place])
        cut = _factor(e, factor, cuts)
        product = None if cut is None else algebra.multiplied(result, cut)
        if product is None:
            return None
        result = product
    # Terms that are zero contribute nothing, so a sum over all positions may run over the first T
    # alone. Dims need no such zero: the slice takes the other positions away.
    summed = [index for index in cuts if set(index) & term.axes and not set(index) & outer]
    return result if all(index in zero for index in summed) else None


def _factor(e: Evaluator, factor: Factor, cuts: Cuts) -> Term | None:
    """Return a factor after the cuts; None where it cannot be cut."""
    touched = [index for index in cuts if set(index) & factor.axes]
    if not touched:
        return Term(1.0, (factor,))
    # A factor that has only a part of a padded dim (one of two merged axes) has no such cut.
    if not all(set(index) <= factor.axes for index in touched):
        return None
    if isinstance(factor, Leaf):
        return _leaf(e, factor, cuts)
    if isinstance(factor, Nested):
        # f(sum of terms) is cut where its sum can be; its free axes are the new ones afterwards.
        terms = _terms(e, factor.inner, cuts)
        free = factor.axes - {a for index in cuts for a in index}
        free |= {a for index in touched for a in cuts[index]}
        inner = None if terms is None else Form(tuple((a,) for a in free), terms)
        return None if inner is None else Term(1.0, (algebra.nested(factor.kind, inner),))
    # Cut at the end, positions keep their numbers, and so their order.
    indices = [_index(index, cuts) for index in factor.indices()]
    if isinstance(factor, Iota) and indices[0] is not None:
        return Term(1.0, (Iota(indices[0]),))
    if isinstance(factor, PositionOrder) and indices[0] is not None and indices[1] is not None:
        return Term(1.0, (PositionOrder(indices[0], indices[1], factor.offset),))
    return None


def _leaf(e: Evaluator, leaf: Leaf, cuts: Cuts) -> Term | None:
    """Return the tensor that was padded in place of the padded one: equal where it is kept."""
    found = e.padded.get(leaf.tensor.name)
    if found is None or leaf.function != IDENTITY or leaf.dims[found.place] not in cuts:
        return None
    # pad(x)[i] = x[i] for i < T.
    form = made_of(found, leaf, cuts[leaf.dims[found.place]])
    return None if form is None else form.terms[0]


def _index(index: Index, cuts: Cuts) -> Index | None:
    """An index after the cuts; None where it is part of one only."""
    if index in cuts:
        return cuts[index]
    return None if any(set(index) & set(cut) for cut in cuts) else index
