"""Constants of a graph in normal form: numbers, positions, triangles, decays under a triangle.

0, 1, ..., n - 1         the position
c where s <= t + k       c [s <= t + k]
r^(t - s), s <= t        [s <= t] exp(log(r) t) exp(-log(r) s), an r for each of the leading dims
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.match.forms import algebra
from linexport.match.forms.axes import Index, fresh
from linexport.match.forms.terms import Form, Iota, Leaf, PositionOrder, Term

EQUAL = 1e-5
"""Largest relative difference of powers in float32 that are equal."""

SHORT = 2
"""Bytes of a number in half precision."""

TINY = 1e-30
"""Powers below it have fewer digits, or none."""


def of_value(tensor: gs.Tensor, value: np.ndarray) -> Form:
    """Return the form of a constant: one number, positions, a triangle, decays, or else a leaf."""
    dims = tuple(fresh(Size(n)) for n in value.shape)
    plain = Form(dims, (Term(1.0, (Leaf(tensor, dims),)),))
    if value.size == 0 or value.dtype.kind not in "fiub":
        return plain
    first, last = value.flat[0], value.flat[-1]
    if first == last and bool((value == first).all()):
        # As the shortest decimal of its dtype: 1e-6 rather than 9.99999997e-07. That of half
        # precision is off by up to a thousandth.
        shortest = value.dtype.kind == "f" and value.dtype.itemsize > SHORT
        return algebra.constant(float(str(first)) if shortest else float(first), dims)
    if value.ndim == 1 and value.size > 1 and np.array_equal(value, np.arange(value.size)):
        return Form(dims, (Term(1.0, (Iota(dims[0]),)),))
    return _triangle(value, dims) or _decays(tensor, value, dims) or plain


def _triangle(value: np.ndarray, dims: tuple[Index, ...]) -> Form | None:
    """Return c [s <= t + k] for a matrix of c on one side of a diagonal and 0 on the other.

    Its two dims may be anywhere among others of size 1.
    """
    sizes = [n for n in value.shape if n > 1]
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        return None
    square = value.reshape(sizes)
    number = next((float(x) for x in (square[0, -1], square[-1, 0]) if x != 0), 0.0)
    filled = square != 0
    if not number or not bool((square[filled] == number).all()):
        return None
    below = square[-1, 0] != 0
    # Row 0 alone gives k: its last column below the diagonal; where it has none, column 0 does. All
    # other rows are then compared with that triangle.
    lower = filled if below else ~filled
    width = int(lower[0].sum())
    offset = width - 1 if width else -int((~lower[:, 0]).sum())
    if not np.array_equal(lower, np.tri(len(square), k=offset, dtype=bool)):
        return None
    row, column = (index for index in dims if index)
    order = PositionOrder(row, column, offset)
    return Form(dims, (Term(number, (order if below else order.complement(),)),))


def _decays(tensor: gs.Tensor, value: np.ndarray, dims: tuple[Index, ...]) -> Form | None:
    """Return powers of a rate under a triangle; None for any other matrix."""
    square = value.ndim > 1 and value.shape[-1] == value.shape[-2] > 1
    if value.dtype.kind != "f" or not square:
        return None
    rates = value[..., 1, 0].astype(np.float64)
    if not (rates > 0).all() or (rates > 1).any() or not (value[..., 0, 0] == 1).all():
        return None
    t = np.arange(value.shape[-1])
    # r = (r^t)^(1/t): the root divides the relative error by t, so the last power gives the rate to
    # the most digits, unless it is below float32.
    last = value[..., -1, 0].astype(np.float64)
    exact = np.where(last > TINY, np.maximum(last, TINY) ** (1 / t[-1]), rates)
    distance = t[:, None] - t
    powers = np.where(distance >= 0, exact[..., None, None] ** np.maximum(distance, 0), 0)
    if not np.allclose(value, powers, rtol=EQUAL, atol=TINY):
        return None
    row, column, heads = dims[-2], dims[-1], dims[:-2]
    logarithm = np.log(exact)
    rate = Term(float(logarithm)) if not heads else _of_heads(tensor, logarithm, heads)
    free = frozenset(a for index in dims for a in index)
    grown = algebra.exponent(Term(rate.coefficient, (*rate.factors, Iota(row))), free)
    faded = algebra.exponent(Term(-rate.coefficient, (*rate.factors, Iota(column))), free)
    return Form(dims, (Term(1.0, (PositionOrder(row, column), grown, faded)),))


def _of_heads(tensor: gs.Tensor, logarithm: np.ndarray, heads: tuple[Index, ...]) -> Term:
    stored = gs.Constant(f"{tensor.name}/log_rate", logarithm.astype(np.float32))
    return Term(1.0, (Leaf(stored, heads),))
