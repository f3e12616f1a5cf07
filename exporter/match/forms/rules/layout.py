"""Operators that move entries without changing them.

    Transpose, Reshape, Expand    dims are other tuples of the same axes
    Slice                         of positions: [s <= t + c] with another c; of a padding or a
                                  concatenation: what was there before it
    Tile                          of a dim of size 1, as Expand
    Trilu                         times [s <= t + k]

A form is a sum of products whose factors are indexed by axes, so all of this is renaming of axes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper

from linexport.graph.dims import DIVIDED
from linexport.graph.edit import producer
from linexport.graph.monomials import ONE, Size, product
from linexport.graph.partial_eval import numpy_type, stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, size_value, symbols_in
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, fresh, regroup, size_of
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.rules import kernels, pieces, shifts
from linexport.match.forms.rules.padding import unpadded
from linexport.match.forms.rules.positions import same_position
from linexport.match.forms.terms import (
    IDENTITY,
    Factor,
    Form,
    Function,
    Iota,
    Nested,
    PositionOrder,
    Term,
)
from linexport.match.forms.unify import collect

END = 2**31 - 1
"""Slices to here or further go to the end."""


@rule("Identity", "Dropout")
def identity(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form of the input; dropout is none in inference."""
    training = e.ints(node, 2, "training_mode") if node.op == "Dropout" else None
    return None if training and training[0] else e.form(node.inputs[0])


@rule("Cast", "CastLike")
def cast(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form of the input; a single tensor keeps the cast as a function of it."""
    form = e.form(node.inputs[0])
    if form is None or form.leaf is None or form.terms[0].coefficient != 1:
        return form
    made = numpy_type(node) if node.op == "Cast" else node.outputs[0].dtype
    if made is None:
        return form
    # The cast of a tensor is repeated where the fused nodes read it. That of a sum or a product is
    # left out: rounding in between is not part of the formula, and the proof compares the results.
    leaf, dtype = form.leaf, np.dtype(made)
    same = producer(node.inputs[0], "Equal") if dtype.kind == "f" else None
    positions = e.forms(same.inputs) if same else None
    diagonal = same_position(*positions) if positions else None
    if diagonal is not None:
        return diagonal
    if leaf.function == IDENTITY and leaf.tensor.dtype == dtype:
        return form
    to = int(helper.np_dtype_to_tensor_dtype(dtype))
    return _with(form, ("Cast", (("to", to),), leaf.function))


def _with(form: Form, function: Function) -> Form:
    assert form.leaf is not None
    return replace(form, terms=(Term(1.0, (replace(form.leaf, function=function),)),))


@rule("Transpose")
def transpose(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form with its dims in another order."""
    form = e.form(node.inputs[0])
    if form is None:
        return None
    order = node.attrs.get("perm") or range(len(form.dims))[::-1]
    return replace(form, dims=tuple(form.dims[p] for p in order))


@rule("Squeeze", "Unsqueeze")
def squeeze(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form with dims of size 1 taken away or put in."""
    form, axes = e.form(node.inputs[0]), e.ints(node, 1, "axes")
    if form is None:
        return None
    dims = list(form.dims)
    if node.op == "Squeeze":
        gone = range(len(dims)) if axes is None else [a % len(dims) for a in axes]
        # A dim with an axis is not known to have size 1.
        if axes is not None and any(dims[a] for a in gone):
            return None
        return replace(form, dims=tuple(d for p, d in enumerate(dims) if d or p not in gone))
    if axes is None:
        return None
    # ONNX counts the axes of Unsqueeze in the result.
    rank = len(dims) + len(axes)
    for place in sorted(a % rank for a in axes):
        dims.insert(place, ())
    return replace(form, dims=tuple(dims))


@rule("Gather")
def gather(e: Evaluator, node: gs.Node) -> Form | None:
    """Return one entry along a dim: ``x[..., 0]``, or the last of a cumulative sum."""
    form, index = e.form(node.inputs[0]), e.values.numbers(node.inputs[1])
    if form is None or index is None or index.ndim:
        return None
    place = node.attrs.get("axis", 0) % len(form.dims)
    if form.dims[place]:
        start = int(index.item())
        form = _sliced(e, form, place, start, Size(start + 1 or END))
        if form is None or form.dims[place]:
            return None
    return replace(form, dims=form.dims[:place] + form.dims[place + 1 :])


@rule("Reshape", "Flatten")
def reshape(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form with its dims regrouped in row-major order."""
    form = e.form(node.inputs[0])
    if form is None:
        return None
    sizes = [size_of(i) for i in form.dims]
    if node.op == "Flatten":
        axis = node.attrs.get("axis", 1) % (len(sizes) + 1)
        target: list[Size] | None = [product(sizes[:axis]), product(sizes[axis:])]
    else:
        # Where the computation of the shape is not followed: the sizes that the graph states.
        target = _target(e, node, sizes) or stated_sizes(node.outputs[0])
    grouped = None if target is None else regroup(form.dims, target)
    if grouped is None:
        return None
    # An axis that was split is split in every factor: x[a] with a = (a1, a2) is x[(a1, a2)].
    dims, splits = grouped
    return replace(form.rename(splits), dims=tuple(dims))


def _target(e: Evaluator, node: gs.Node, sizes: list[Size]) -> list[Size] | None:
    shape = e.values.get(node.inputs[1])
    if shape is None:
        return None
    copies = not node.attrs.get("allowzero", 0)
    target: list[Size | None] = []
    for place, entry in enumerate(np.atleast_1d(shape)):
        size = entry if isinstance(entry, Size) else Size(int(entry))
        if size == Size(-1):
            target.append(None)
        else:
            target.append(sizes[place] if size == Size(0) and copies else size)
    # -1 is what the other sizes leave of the elements. Where that is not whole, as of chunks whose
    # number is a quotient, it is what the graph states, or an unknown size.
    if target.count(None) == 1:
        place, made = target.index(None), node.outputs[0]
        rest = product(sizes).divided(product([s for s in target if s is not None]))
        stated = stated_sizes(made) or [Size(1, (f"{made.name}[-1]",))] * len(target)
        target[place] = rest or stated[place]
    return None if None in target else [s for s in target if s is not None]


@rule("Expand")
def expand(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form repeated along dims of size 1."""
    form, shape = e.form(node.inputs[0]), e.values.get(node.inputs[1])
    if form is None:
        return None
    if shape is None:
        stated = stated_sizes(node.outputs[0])
        target = None if stated is None else tuple(fresh(s) for s in stated)
    else:
        sizes = [n if isinstance(n, Size) else Size(int(n)) for n in shape]
        target = tuple(fresh(s) for s in sizes)
    if target is None:
        return None
    # Multiplying by ones of the target shape is broadcasting.
    return algebra.times(form, algebra.constant(1.0, target))


@rule("Tile")
def tile(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form repeated along dims of size 1."""
    form, counts = e.form(node.inputs[0]), e.values.get(node.inputs[1])
    if form is None or counts is None:
        return None
    sizes = [n if isinstance(n, Size) else Size(int(n)) for n in counts]
    if any(index and n != ONE for index, n in zip(form.dims, sizes, strict=True)):
        return None
    target = tuple(() if index else fresh(n) for index, n in zip(form.dims, sizes, strict=True))
    return algebra.times(form, algebra.constant(1.0, target))


@rule("Slice")
def slice_(e: Evaluator, node: gs.Node) -> Form | None:
    """Return a slice: all of a dim, a part of positions, or one piece of a concatenation."""
    form, axes = e.form(node.inputs[0]), e.ints(node, 3, "axes")
    if form is None or any(s != 1 for s in e.ints(node, 4, "steps") or ()):
        return None
    first, ends = _bounds(e, node, 1, "starts"), _bounds(e, node, 2, "ends")
    if first is None or ends is None:
        return None
    places = [a % len(form.dims) for a in axes or range(len(first))]
    pairs = zip(first, places, strict=True)
    starts = [_start(n, size_of(form.dims[place])) for n, place in pairs]
    if len(places) == 1 and starts[0] == 0:
        given, made = node.inputs[0].name, node.outputs[0].name
        delayed = shifts.cut(e, given, made, places[0], form, ends[0])
        if delayed is not None:
            return delayed
        convolved = kernels.convolution(e, node.inputs[0], places[0], ends[0])
        if convolved is not None:
            return convolved
    behind = e.behind.get(node.inputs[0].name)
    if (
        behind is not None
        and places == [behind.place]
        and starts == [1]
        and _is_end(ends[0], form, places[0])
    ):
        return behind.rest
    for place, start, end in zip(places, starts, ends, strict=True):
        sliced = None if start is None else _sliced(e, form, place, start, end)
        if sliced is None:
            return None
        form = sliced
    return form


def _bounds(e: Evaluator, node: gs.Node, position: int, attribute: str) -> list[Size] | None:
    if attribute in node.attrs:
        return [Size(n) for n in node.attrs[attribute]]
    given = e.values.get(node.inputs[position])
    if given is None:
        return None
    return [n if isinstance(n, Size) else Size(int(n)) for n in np.atleast_1d(given)]


def _start(start: Size, whole: Size) -> int | None:
    """Return the first position of a slice; -T of T + 1 positions is 1."""
    if start.known is not None:
        return start.known
    symbols = sorted(symbols_in(start) | symbols_in(whole))
    found = set()
    for length in (DIVIDED, 3 * DIVIDED):
        # Each symbol has its own size: what is equal by chance at one length differs at another.
        sizes = {name: length * (2 + place) for place, name in enumerate(symbols)}
        try:
            from_end = size_value(start, sizes)
            found.add(from_end + size_value(whole, sizes) if from_end < 0 else -1)
        except NotRunnableError:
            return None
    return found.pop() if len(found) == 1 and min(found) >= 0 else None


def _is_end(end: Size, form: Form, place: int) -> bool:
    """Return whether a slice to there takes all to the last position."""
    return end == size_of(form.dims[place]) or (end.known is not None and end.known >= END)


def _sliced(e: Evaluator, form: Form, place: int, start: int, end: Size) -> Form | None:
    index = form.dims[place]
    size = size_of(index)
    if start == 0 and _is_end(end, form, place):
        return form
    # Of a known size, numbers from the end become numbers from the start.
    if size.known is not None:
        start = max(start + size.known, 0) if start < 0 else start
        last = size.known if end.known is None else min(end.known, size.known)
        last = last + size.known if last < 0 else last
        # The piece of a concatenation that lies there is simpler than a slice of the whole.
        whole = end.known is not None
        piece = pieces.taken_out(e, form, place, start, last) if whole else None
        if piece is not None:
            return piece
        end = Size(last - start) if end.known is not None else end
    if start == 1 and _is_end(end, form, place):
        return pieces.behind_zero(e, form, place)
    # The first positions of a padded dim are the dim before the padding.
    cut = unpadded(e, form, place, end) if start == 0 else None
    if cut is not None:
        return cut
    # Otherwise the new size must be known: it is that of the axis in the place of the sliced one.
    if start < 0 or len(index) != 1 or (end.known is None and start):
        return None
    if end.known is not None and (end.known <= 0 or size.known is None):
        return None
    return _shifted(form, place, index[0], start, end)


def _shifted(form: Form, place: int, axis: Axis, start: int, size: Size) -> Form | None:
    """Return a slice where every factor depends on the axis by its position only."""
    new = fresh(size)
    terms = []
    for term in form.terms:
        factors = []
        for factor in term.factors:
            if axis not in factor.axes:
                factors.append(factor)
                continue
            if not new and _is_met(factor, axis, start):
                continue
            total = None if new else _total(factor, axis, start)
            if total is not None:
                factors.append(total)
                continue
            # The values of a tensor would be others; a position is t, or t + start for a triangle.
            if (
                not new
                or not _by_position(factor, axis)
                or (start and not isinstance(factor, PositionOrder))
            ):
                return None
            moved = factor.rename({axis: new})
            if isinstance(moved, PositionOrder) and isinstance(factor, PositionOrder):
                # Position i of the slice is position i + start of the whole: [s <= t + c] becomes
                # [s <= t + start + c] for a sliced t, and [s + start <= t + c] for a sliced s.
                by = start * ((axis in factor.row) - (axis in factor.column))
                moved = replace(moved, offset=moved.offset + by)
            factors.append(moved)
        shifted = Term(term.coefficient, tuple(factors))
        # A sum over s of 1 is the number of s, which no factor is left to tell.
        if not term.axes - {axis} <= shifted.axes | form.axes:
            return None
        terms.append(shifted)
    dims = tuple(new if p == place else i for p, i in enumerate(form.dims))
    return collect(Form(dims, tuple(terms)))


def _total(factor: Factor, axis: Axis, at: int) -> Nested | None:
    """Return exp of a running sum at the last position: exp of the sum of all."""
    if not isinstance(factor, Nested) or factor.kind != "exp":
        return None
    terms = []
    for term in factor.inner.terms:
        left = tuple(f for f in term.factors if axis not in f.axes or not _is_met(f, axis, at))
        summed = Term(term.coefficient, left)
        if axis in summed.axes or term.axes - {axis} != summed.axes:
            return None
        terms.append(summed)
    dims = tuple(index for index in factor.inner.dims if axis not in index)
    return algebra.nested(factor.kind, Form(dims, tuple(terms)))


def _is_met(factor: Factor, axis: Axis, at: int) -> bool:
    """Return whether [s <= t + c] holds for all t or all s, with the other at one position."""
    if not isinstance(factor, PositionOrder):
        return False
    if factor.column == (axis,):
        return at <= factor.offset
    last = size_of(factor.column).known
    return factor.row == (axis,) and last is not None and last - 1 <= at + factor.offset


def _by_position(factor: Factor, axis: Axis) -> bool:
    """Return whether a factor depends on an axis by its position only."""
    if isinstance(factor, Nested):
        inside = [f for term in factor.inner.terms for f in term.factors]
        return all(axis not in f.axes or isinstance(f, Iota) for f in inside)
    return isinstance(factor, PositionOrder | Iota)


@rule("Trilu")
def trilu(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the product with a triangle."""
    form, offset = e.form(node.inputs[0]), e.ints(node, 1, "k") or [0]
    given = len(node.inputs) > 1 and not node.inputs[1].is_empty()
    if form is None or (given and not e.is_constant(node.inputs[1])):
        return None
    row, column = form.dims[-2:]
    if not row or not column:
        return None
    # Tril keeps column s of row t where s <= t + k.
    order = PositionOrder(row, column, offset[0])
    if node.attrs.get("upper", 1):
        # Triu keeps s >= t + k, which is t <= s - k.
        order = PositionOrder(column, row, -offset[0])
    triangle = Form(form.dims, (Term(1.0, (order,)),))
    products = [algebra.multiplied(t, s) for t in form.terms for s in triangle.terms]
    return collect(Form(form.dims, tuple(p for p in products if p is not None)))
