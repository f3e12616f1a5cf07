"""Concatenations, of which a slice takes one piece out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.match.forms import algebra
from linexport.match.forms.axes import Index, size_of, unify
from linexport.match.forms.evaluate import Along, Behind, Evaluator, Pieces, rule
from linexport.match.forms.functions import casts_to_float
from linexport.match.forms.rules import shifts
from linexport.match.forms.terms import IDENTITY, Form, Function, Leaf, Term
from linexport.match.forms.unify import collect

Whole = Callable[[Leaf], Along | None]
"""Gives the piece of a tensor, and the dim along which it is one."""


@rule("Concat")
def concat(e: Evaluator, node: gs.Node) -> Form | None:
    """Return None, and note the parts, for a slice that takes one of them out again.

    Zeros in front of a value without its last positions are the value delayed.
    """
    forms = e.forms(node.inputs)
    if forms is not None and len(forms) == 2 and forms[0].scalar == 0:
        place = node.attrs["axis"] % len(forms[0].dims)
        count = size_of(forms[0].dims[place]).known
        if count is not None and len(forms[0].dims) == len(forms[1].dims):
            given, made = node.inputs[1].name, node.outputs[0].name
            delayed = shifts.put_zeros_in_front(e, given, made, place, forms[1], count)
            if delayed is not None:
                return delayed
    if forms is not None and len(forms) == 2:
        place = node.attrs["axis"] % len(forms[0].dims)
        if not forms[0].dims[place]:
            e.behind[node.outputs[0].name] = Behind(place, *forms)
    if forms is None or not all(f.leaf is not None or f.scalar is not None for f in forms):
        return None
    place = node.attrs["axis"] % len(forms[0].dims)
    sizes = [size_of(f.dims[place]).known for f in forms]
    if all(s is not None for s in sizes):
        known = [s for s in sizes if s is not None]
        parts = tuple(zip(known, forms, strict=True))
        e.pieces[node.outputs[0].name] = Pieces(place, parts)
    return None


def taken_out(e: Evaluator, form: Form, place: int, start: int, end: int) -> Form | None:
    """Return what lies from start to end, where that is one piece of a Pad or Concat."""

    def piece(leaf: Leaf) -> Along | None:
        pieces = e.pieces.get(leaf.tensor.name)
        part = None if pieces is None else _part(pieces, start, end)
        return None if pieces is None or part is None else Along(pieces.place, part)

    return _exchanged(form, place, piece)


def behind_zero(e: Evaluator, form: Form, place: int) -> Form | None:
    """Return all but the first position, where that is a zero that was put in front."""
    return _exchanged(form, place, lambda leaf: e.delayed.get(leaf.tensor.name))


def _exchanged(form: Form, place: int, piece: Whole) -> Form | None:
    """Return a form with pieces in the place of the tensors that depend on a dim."""
    index = form.dims[place]
    terms: list[Term] = []
    new: Index | None = None
    for term in form.terms:
        # One tensor alone depends on the dim: a product of two would need the same piece of both.
        using = [f for f in term.factors if f.axes & set(index)]
        if not using:
            terms.append(term)
            continue
        leaf = using[0]
        if len(using) != 1 or not isinstance(leaf, Leaf):
            return None
        found = _piece_along(leaf, index, piece)
        part = None if found is None else _renamed(found, leaf, term, new)
        if found is None or part is None:
            return None
        new = part.dims[found.place]
        # coefficient * rest * whole becomes coefficient * rest * piece, a sum where that is one.
        rest = Term(term.coefficient, tuple(f for f in term.factors if f is not leaf))
        products = [algebra.multiplied(rest, t) for t in part.terms]
        terms += [t for t in products if t is not None]
    if new is None:
        return None
    return collect(
        Form(tuple(new if p == place else i for p, i in enumerate(form.dims)), tuple(terms))
    )


def _piece_along(leaf: Leaf, index: Index, piece: Whole) -> Along | None:
    """Return the piece of a leaf along a dim, cast as the leaf is; None of other functions."""
    found = piece(leaf)
    if found is None or leaf.dims[found.place] != index:
        return None
    if leaf.function == IDENTITY:
        return found
    cast = _cast(found.form, leaf.function)
    return None if cast is None else replace(found, form=cast)


def _renamed(found: Along, leaf: Leaf, term: Term, new: Index | None) -> Form | None:
    """Return a piece that has the axes of its leaf; None where those of a term are in the way.

    It has axes of its own: along the other dims they are made those of the whole, and along its
    dim those of the pieces of other terms.
    """
    part = found.form.fresh()
    for place, index in enumerate(leaf.dims):
        own, target = part.dims[place], new if place == found.place else index
        if own and target is not None:
            shared = unify(target, own)
            if shared is None or any(a in term.axes for a in shared):
                return None
            part = part.rename(shared)
    return part


def _cast(form: Form, function: Function) -> Form | None:
    """Return a piece of a tensor that is cast to a floating-point type; None for other functions.

    What is a number is the same in every type.
    """
    if form.scalar is not None and function[0] == "Cast":
        return form if function[2] == IDENTITY and casts_to_float(function) else None
    leaf = form.leaf
    if leaf is None or not casts_to_float(function) or function[2] != IDENTITY:
        return None
    own = replace(leaf, function=(*function[:2], leaf.function))
    return replace(form, terms=(Term(form.terms[0].coefficient, (own,)),))


def _part(pieces: Pieces, start: int, end: int) -> Form | None:
    """Return the piece that fills exactly start to end, None where a cut goes through one."""
    at = 0
    for size, form in pieces.parts:
        if (at, at + size) == (start, end):
            return form
        at += size
    return None
