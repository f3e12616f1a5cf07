"""Causal convolutions of tokens with a kernel as long as the sequence, as sums over earlier tokens.

    irfft(rfft(u, n) rfft(K, n), n)[: T]    is    y_t = sum_s [s <= t] K_{t-s} u_s,    n >= 2 T - 1
    Conv(Pad(u, T - 1 zeros in front), K backwards)    is    the same
    K[max(t - s, 0)]                        is    [s <= t] K_{t-s} + [s > t] K_0

where K depends on its position as exp(a t) does, so that K_{t-s} is a product of factors of t and
of s, or as cos(b t) or sin(b t) besides, whose angle is then b t - b s. The convolution is cyclic,
of length n; nothing wraps around where n is that large.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.monomials import Size
from linexport.match.forms import algebra
from linexport.match.forms.axes import Index, fresh, size_of
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.fourier import compare, read_convolution
from linexport.match.forms.rules.oscillations import at_difference, kernel_form
from linexport.match.forms.rules.padding import ends_of, fills_zero
from linexport.match.forms.terms import TURNS, Factor, Form, Iota, Nested, PositionOrder, Term

END = 1 << 31
"""Slices to before -END, backwards, go to the first position."""


def convolution(e: Evaluator, tensor: gs.Tensor, place: int, size: Size) -> Form | None:
    """Return the first positions of a convolution by Fourier transforms, as a sum over tokens.

    Args:
        e: of the graph.
        tensor: the convolution.
        place: the dim that is cut.
        size: of what is kept, from the first position.
    """
    form = e.form(tensor)
    found = None if form is None else read_convolution(e, tensor, size)
    if form is None or found is None or found.along != place - len(form.dims):
        return None
    forms = e.forms(found.operands)
    if forms is None or any(size_of(f.dims[found.along]) != size for f in forms):
        return None
    operands = list(zip(found.operands, forms, strict=True))
    for (kernel, own), (_, tokens) in (operands, operands[::-1]):
        summed = _summed(kernel_form(e, kernel, own), tokens, found.along)
        if summed is not None:
            return summed
    return None


@rule("Conv")
def convolved(e: Evaluator, node: gs.Node) -> Form | None:
    """Return a convolution along all tokens, one kernel a channel, as a sum over tokens."""
    pad, kernel = producer(node.inputs[0], "Pad"), _backwards(e, node.inputs[1])
    if pad is None or kernel is None or _has_bias(e, node):
        return None
    forms = e.forms([kernel, pad.inputs[0]])
    if forms is None or [len(f.dims) for f in forms] != [2, 3] or not _is_plain(node):
        return None
    (channels, size), tokens = (size_of(i) for i in forms[0].dims), forms[1]
    if size_of(tokens.dims[2]) != size or channels != Size(node.attrs.get("group", 1)):
        return None
    front, behind = ends_of(e, pad)
    # With T - 1 zeros in front, position t meets the tokens 0 to t and no later one.
    whole = list(front) == [2] and not behind and fills_zero(e, pad)
    if not whole or not compare(front[2], size, lambda a, b: a == b - 1):
        return None
    return _summed(kernel_form(e, kernel, forms[0]), tokens, -1)


def is_long(node: gs.Node) -> bool:
    """Return whether a node is a convolution whose kernel is of no fixed length."""
    shape = node.inputs[1].shape if node.op == "Conv" else None
    return shape is not None and not isinstance(shape[-1], int)


def long_obstacle(e: Evaluator, node: gs.Node) -> str:
    """Return what is in the way of a convolution: "bias", "not turned around", or "" for others."""
    if _has_bias(e, node):
        return "bias"
    return "not turned around" if _backwards(e, node.inputs[1]) is None else ""


def _has_bias(e: Evaluator, node: gs.Node) -> bool:
    return len(node.inputs) > 2 and not e.values.is_zero(node.inputs[2])


def _is_plain(node: gs.Node) -> bool:
    """Return whether a convolution has no padding of its own, and takes every position."""
    ones = all(set(node.attrs.get(name, [1])) == {1} for name in ("strides", "dilations"))
    padded = any(node.attrs.get("pads", [])) or node.attrs.get("auto_pad", "NOTSET") != "NOTSET"
    return ones and not padded


def _backwards(e: Evaluator, weight: gs.Tensor) -> gs.Tensor | None:
    """Return K (D, T) of a weight (D, 1, T) that is K from its last position to the first."""
    unsqueezed = producer(weight, "Unsqueeze")
    turned = None if unsqueezed is None else producer(unsqueezed.inputs[0], "Slice")
    if unsqueezed is None or turned is None or e.ints(unsqueezed, 1, "axes") != [1]:
        return None
    start, end, axis, step = (e.ints(turned, i, "") for i in range(1, 5))
    # Conv correlates, y_t = sum_j w_j x_{t+j}: of w backwards, token s meets K_{t-s}.
    whole = start == [-1] and end is not None and len(end) == 1 and end[0] < -END
    return turned.inputs[0] if whole and axis in ([-1], [1]) and step == [-1] else None


def _summed(kernel: Form, tokens: Form, along: int) -> Form | None:
    """Return sum_s [s <= t] K_{t-s} u_s along a dim, counted from the end."""
    matrix = by_difference(_moved(kernel, along, -1))
    if matrix is None:
        return None
    t, s = matrix.dims[-2:]
    last = _moved(tokens, along, -1)
    spread = replace(last, dims=(*last.dims[:-1], (), last.dims[-1]))
    # K has no entry for t < s: the factors exp(a t) exp(-a s) do, which the mask removes.
    masked = algebra.times(matrix, Form((t, s), (Term(1.0, (PositionOrder(t, s),)),)))
    product = masked and algebra.times(masked, spread)
    if product is None:
        return None
    return _moved(algebra.summed(product, [len(product.dims) - 1], keep=False), -1, along)


def _moved(form: Form, source: int, target: int) -> Form:
    """Return a form with a dim at another place, both counted from the end."""
    rank, dims = len(form.dims), list(form.dims)
    dims.insert(rank + target, dims.pop(rank + source))
    return replace(form, dims=tuple(dims))


def by_difference(form: Form) -> Form | None:
    """Return X_{t-s}, t and s as last dims, of X whose last dim is a position; None of others."""
    if len(form.dims[-1]) != 1:
        return None
    size = size_of(form.dims[-1])
    t, s = fresh(size), fresh(size)
    terms = [_parted(term, form.dims[-1], t, s) for term in form.terms]
    if any(term is None for term in terms):
        return None
    return Form((*form.dims[:-1], t, s), tuple(term for term in terms if term is not None))


def _parted(term: Term, position: Index, t: Index, s: Index) -> Term | None:
    factors: list[Factor] = []
    for factor in term.factors:
        if not factor.axes & set(position):
            factors.append(factor)
        elif not isinstance(factor, Nested) or not _is_of_multiple(factor, position):
            return None
        elif factor.kind == "exp":
            # exp(a (t - s)) = exp(a t) exp(-a s).
            (axis,) = position
            grown, fading = (factor.rename({axis: index}) for index in (t, s))
            inverse = tuple(x.scaled(-1.0) for x in fading.inner.terms)
            factors += [grown, replace(fading, inner=replace(fading.inner, terms=inverse))]
        elif factor.kind in TURNS:
            factors.append(at_difference(factor, position, t, s))
        else:
            return None
    return Term(term.coefficient, tuple(factors))


def _is_of_multiple(factor: Nested, position: Index) -> bool:
    """Return whether a function is of a l, of a position l and an a that does not depend on it."""
    inside = [f for term in factor.inner.terms for f in term.factors if f.axes & set(position)]
    return len(factor.inner.terms) == 1 and inside == [Iota(position)]


def at_distance(kernel: Form, distance: Form) -> Form | None:
    """Return K[..., max(t - s, 0)], for a kernel K of its last dim; None for other indices."""
    places = _row_and_column(distance)
    by_distance = None if places is None else by_difference(kernel)
    if places is None or by_distance is None:
        return None
    row, column = places
    (t,), (s,) = by_distance.dims[-2:]
    if {size_of(index) for index in places} != {t.size}:
        return None
    matrix = by_distance.rename({t: row, s: column})
    order = PositionOrder(row, column)
    later, first = (Form((row, column), (Term(1.0, (o,)),)) for o in (order, order.complement()))
    own = kernel.dims[-1]
    # exp(0) and cos(0) are 1, and sin(0) is 0.
    at_zero = [
        Term(x.coefficient, tuple(f for f in x.factors if not f.axes & set(own)))
        for x in kernel.terms
        if not any(f.kind == "sin" and f.axes & set(own) for f in x.of(Nested))
    ]
    start = Form((*kernel.dims[:-1], (), ()), tuple(at_zero))
    kept, rest = algebra.times(matrix, later), algebra.times(start, first)
    return kept and rest and algebra.plus(kept, rest)


def _row_and_column(distance: Form) -> tuple[Index, Index] | None:
    """Return t and s, where an index with these dims is [s <= t] (t - s)."""
    if len(distance.dims) != 2 or len(distance.terms) != 2:
        return None
    row, column = distance.dims
    order = PositionOrder(row, column)
    expected = {
        (1.0, frozenset((order, Iota(row)))),
        (-1.0, frozenset((order, Iota(column)))),
    }
    found = {(t.coefficient, frozenset(t.factors)) for t in distance.terms}
    return (row, column) if found == expected else None
