"""Operators that sum: products of matrices, einsums, reductions, cumulative sums."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.operators import CHOICES
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.rules.oscillations import matrix_form
from linexport.match.forms.terms import Form, Iota, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import collect

EXPONENTIAL = {"Exp", "Softmax"}
KEPT = CHOICES | {"Add", "Div", "Mul", "Sub", "Where"}
"""Operators that exponents may pass through."""


def contraction(e: Evaluator, a: Form, b: Form, gone: list[int], keep: bool) -> Form | None:
    """Return the product, as NumPy broadcasts, summed over dims.

    A product with a weight is a projection: it is left in front of the attention.
    """
    product = algebra.times(a, b)
    if product is None:
        return None
    lost = {x for p in gone for x in product.dims[p]}
    if any(_is_projection(e, term, lost) for term in product.terms):
        return None
    return algebra.summed(product, gone, keep)


def _is_projection(e: Evaluator, term: Term, lost: set[Axis]) -> bool:
    """Return whether a weight is summed over, besides one that weighs products of two tensors.

    sum_d q_d u_d k_d is a product of q and k: RWKV's newest key is weighed by u. A sum of powers of
    positions, sum_n c_n exp(a_n t), is a kernel and no projection.
    """
    leaves: list[Leaf] = term.of(Leaf)
    tensors = [f.axes for f in leaves if not e.is_weight(f.tensor)]
    if not tensors and any(x.of(Iota) for f in term.of(Nested) for x in f.inner.terms):
        return False
    for leaf in leaves:
        summed = leaf.axes & lost
        if not summed or not e.is_weight(leaf.tensor):
            continue
        if sum(summed <= axes for axes in tensors) < 2 or leaf.axes - frozenset().union(*tensors):
            return True
    return False


def _operands(e: Evaluator, node: gs.Node) -> list[Form] | None:
    """Return the forms of what is multiplied, in which triangles of powers may turn."""
    forms = e.forms(node.inputs)
    return forms and [matrix_form(e, x, form) for x, form in zip(node.inputs, forms, strict=True)]


@rule("MatMul")
def matmul(e: Evaluator, node: gs.Node) -> Form | None:
    """Return sum_j a[..., i, j] b[..., j, k]."""
    forms = _operands(e, node)
    if forms is None or any(len(f.dims) < 2 for f in forms):
        return None
    a, b = forms
    # a[..., i, j, 1] b[..., 1, j, k] has dims (..., i, j, k), of which j is summed over.
    a = replace(a, dims=(*a.dims, ()))
    b = replace(b, dims=(*b.dims[:-2], (), *b.dims[-2:]))
    rank = max(len(a.dims), len(b.dims))
    return contraction(e, a, b, [rank - 2], keep=False)


@rule("Gemm")
def gemm(e: Evaluator, node: gs.Node) -> Form | None:
    """Return alpha a b, where nothing is added."""
    if len(node.inputs) > 2 and not node.inputs[2].is_empty():
        return None
    forms = e.forms(node.inputs[:2])
    if forms is None:
        return None
    a, b = (
        replace(f, dims=f.dims[::-1]) if node.attrs.get(flag, 0) else f
        for f, flag in zip(forms, ("transA", "transB"), strict=True)
    )
    # As of MatMul: a[i, j, 1] b[1, j, k], of which j is summed over.
    a = replace(a, dims=(*a.dims, ()))
    b = replace(b, dims=((), *b.dims))
    # (alpha a) b = alpha (a b).
    scaled = algebra.times(a, algebra.constant(float(node.attrs.get("alpha", 1.0))))
    return scaled and contraction(e, scaled, b, [1], keep=False)


@rule("Einsum")
def einsum(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the sum of products that the equation states; an ellipsis stands for leading dims."""
    forms = _operands(e, node)
    if forms is None:
        return None
    sources, target = _letters(node.attrs["equation"], [len(f.dims) for f in forms])
    letters = list(dict.fromkeys(target + "".join(sources)))
    spread = [_spread(f, source, letters) for f, source in zip(forms, sources, strict=True)]
    gone = [p for p, letter in enumerate(letters) if letter not in target]
    result = spread[0]
    if result is None:
        return None
    if len(spread) == 1:
        return algebra.summed(result, gone, keep=False)
    for position, other in enumerate(spread[1:], start=2):
        # Summed over once all factors are in: a sum taken earlier could not include the later ones.
        last = position == len(spread)
        if other is None or result is None:
            return None
        result = contraction(e, result, other, gone if last else [], keep=False)
    return result


def _letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Letters of each input and of the output, with capitals in the place of an ellipsis."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    sources = left.split(",")
    free = [c for c in map(chr, range(0x3B1, 0x3C9)) if c not in text]
    widths = [r - len(s.replace("...", "")) for s, r in zip(sources, ranks, strict=True)]
    width = max([w for w, s in zip(widths, sources, strict=True) if "..." in s], default=0)
    leading = "".join(free[:width])
    named = [
        s.replace("...", leading[width - w :] if w else "")
        for s, w in zip(sources, widths, strict=True)
    ]
    if arrow:
        return named, right.replace("...", leading)
    once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
    return named, leading + "".join(once)


def _spread(form: Form, source: str, letters: list[str]) -> Form | None:
    """Return a form with a dim for every letter; None for a diagonal, one letter used twice."""
    if len(set(source)) != len(source):
        return None
    dims: list[Index] = [
        form.dims[source.index(letter)] if letter in source else () for letter in letters
    ]
    return replace(form, dims=tuple(dims))


@rule("ReduceSum", "ReduceMean")
def reduce(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the sum over dims, or the mean: the sum times one over their size."""
    form, axes = e.form(node.inputs[0]), e.ints(node, 1, "axes")
    if form is None:
        return None
    if axes is None:
        given = len(node.inputs) > 1 and not node.inputs[1].is_empty()
        if given or node.attrs.get("noop_with_empty_axes", 0):
            return None
    places = [a % len(form.dims) for a in axes] if axes else list(range(len(form.dims)))
    if form.leaf is not None and _is_exponent(form, places, node.outputs[0]):
        return None
    if node.op == "ReduceSum":
        return algebra.summed(form, places, bool(node.attrs.get("keepdims", 1)))
    # The mean of a dim of several labels is the mean over each: 1 / (n m) = (1 / n) (1 / m).
    for place in places:
        for axis in form.dims[place]:
            known = axis.size.known
            if known is None:
                share = algebra.one_over(algebra.counted(axis.size))
            else:
                share = algebra.constant(1 / known)
            form = share and algebra.times(form, share)
            if form is None:
                return None
    return algebra.summed(form, places, bool(node.attrs.get("keepdims", 1)))


def _is_exponent(form: Form, places: list[int], tensor: gs.Tensor) -> bool:
    """Return whether a sum over channels of one tensor is a score of tokens, of which exp is taken.

    Such a score is one number for each token: a tensor of its own.
    """
    if any(a.size.known is None for p in places for a in form.dims[p]):
        return False
    pending, seen = [tensor], set[str]()
    while pending:
        here = pending.pop()
        # What is subtracted from numbers of several channels is part of a feature map.
        if here.name in seen or here.shape is None or _width(here) != _width(tensor):
            continue
        seen.add(here.name)
        if any(node.op in EXPONENTIAL for node in here.outputs):
            return True
        pending += [o for node in here.outputs if node.op in KEPT for o in node.outputs]
    return False


def _width(tensor: gs.Tensor) -> int:
    """Return the product of the sizes that are fixed."""
    return math.prod(size for size in tensor.shape or () if isinstance(size, int))


@rule("CumSum")
def cumsum(e: Evaluator, node: gs.Node) -> Form | None:
    """Return sum_s [s <= t] x_s, with < if exclusive and >= if reverse."""
    form, axis = e.form(node.inputs[0]), e.values.numbers(node.inputs[1])
    if form is None or axis is None:
        return None
    place = int(axis.item()) % len(form.dims)
    # The dim's labels are summed over from now on; a new label takes the dim's place.
    column = form.dims[place]
    row = tuple(Axis(a.size) for a in column)
    offset = -1 if node.attrs.get("exclusive", 0) else 0
    order = PositionOrder(row, column, offset)
    if node.attrs.get("reverse", 0):
        # [t <= s + offset]: the same order read from the other side.
        order = PositionOrder(column, row, offset)
    products = [algebra.multiplied(t, Term(1.0, (order,))) for t in form.terms]
    dims = tuple(row if p == place else i for p, i in enumerate(form.dims))
    return collect(Form(dims, tuple(p for p in products if p is not None)))
