"""Masks by position as functions of the distance from key to query.

    [s <= t] [t - 3 <= s]      is      1 where t - s is 0 ... 3, else 0

A mask is followed through comparisons, logic and fillings, from orders of positions and from stored
matrices of which every diagonal has one value. Any other operator ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.monomials import Size
from linexport.graph.partial_eval import numpy_type
from linexport.match.errors import NotAttentionError
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.rules.elementwise import VERY_NEGATIVE
from linexport.match.forms.terms import Factor, Form, Iota, PositionOrder, Term

FARTHEST = 1 << 20
"""Masks that change at larger distances are not followed."""

SHIFTS = (0, 5, 17)
"""Places of a key at which a value must be the same to be one of the distance alone."""

ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}
OPERATORS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    "Not": np.logical_not,
    "Neg": np.negative,
    "Abs": np.abs,
    "Identity": np.asarray,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Where": np.where,
    "Max": lambda *parts: reduce(np.maximum, parts),
    "Min": lambda *parts: reduce(np.minimum, parts),
}
"""Operators that act on entries, as numpy has them."""

LAYOUT = ("Unsqueeze", "Squeeze", "Expand", "Reshape", "Slice")

At = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ByDistance:
    """A matrix whose entry in row t and column s depends on t - s alone.

    Attributes:
        reach: distances at which the entries change are not farther than this, in either direction.
        at: gives the entries at distances.
    """

    reach: int
    at: At


def window(seen: Sequence[ByDistance]) -> int | None:
    """Return how many tokens a query sees, itself the last of them; None: all before it.

    Args:
        seen: masks that are true, all of them, where a query sees a key.

    Raises:
        NotAttentionError: the tokens seen are not the last ones.
    """
    distances = _distances(max((mask.reach for mask in seen), default=0))
    visible = np.ones(len(distances), bool)
    for mask in seen:
        visible &= mask.at(distances).astype(bool)
    count = int(visible.sum())
    if not np.array_equal(visible, (distances >= 0) & (distances < count)):
        raise NotAttentionError("its mask does not keep the last tokens and only those")
    # Beyond their reach the masks are constant: a query that sees the last distance sees all.
    return None if visible[-1] else count


def condition(e: Evaluator, tensor: gs.Tensor, keeps: bool = True) -> ByDistance:
    """Return where a mask (..., T, T) of truth values is ``keeps``.

    Raises:
        NotAttentionError: it depends on more than the distance.
    """
    found = _read(e, tensor)
    return ByDistance(found.reach, lambda d: found.at(d).astype(bool) == keeps)


def added(e: Evaluator, tensor: gs.Tensor) -> tuple[ByDistance, float]:
    """Return where a mask (..., T, T) that is added to scores leaves them, and what it adds else.

    Raises:
        NotAttentionError: it depends on more than the distance, or adds other numbers.
    """
    found = _read(e, tensor)
    values = np.unique(found.at(_distances(found.reach)))
    if len(values) != 2 or values[1] != 0 or not values[0] <= VERY_NEGATIVE:
        raise NotAttentionError("what is added to its scores is not a mask")
    return ByDistance(found.reach, lambda d: found.at(d) == 0), float(values[0])


def read_distances(e: Evaluator, tensor: gs.Tensor) -> ByDistance:
    """Return a matrix (..., T, T) of which the distance decides each entry.

    Raises:
        NotAttentionError: it depends on more than that.
    """
    return _read(e, tensor)


def _distances(reach: int) -> np.ndarray:
    """Return all distances up to two beyond those at which entries change."""
    if reach > FARTHEST:
        raise NotAttentionError(f"its mask reaches farther than {FARTHEST} tokens")
    return np.arange(-reach - 2, reach + 3)


def _read(e: Evaluator, tensor: gs.Tensor) -> ByDistance:
    form = e.form(tensor)
    if form is not None:
        if form.scalar is not None:
            return _number(form.scalar)
        if _is_of_positions(form):
            return _of_form(form)
    if isinstance(tensor, gs.Constant):
        return _stored(np.asarray(tensor.values))
    node = producer(tensor)
    if node is None:
        raise NotAttentionError(f"its mask depends on {tensor.name}")
    return _computed(e, node)


def _number(value: float) -> ByDistance:
    # Positions are not compared with the numbers that fill masks, -inf or inf among them.
    reach = math.ceil(abs(value)) if VERY_NEGATIVE < value < math.inf else 0
    return ByDistance(reach, lambda d: np.full(len(d), value))


def _computed(e: Evaluator, node: gs.Node) -> ByDistance:
    """Return what a node makes of matrices."""
    if node.op in LAYOUT and _keeps_matrix(e, node):
        return _read(e, node.inputs[0])
    if node.op in ("Cast", "CastLike"):
        kind = numpy_type(node) if node.op == "Cast" else node.inputs[1].dtype
        return _cast(_read(e, node.inputs[0]), kind)
    if node.op in READERS:
        return READERS[node.op](e, node)
    if node.op not in OPERATORS:
        raise NotAttentionError(f"its mask passes through {node.op} {node.name}")
    parts = [_read(e, t) for t in node.inputs]
    # Entries change where a part does, or where a distance meets a number, whose size is its reach.
    reach = sum(part.reach for part in parts)
    if node.op in ARITHMETIC:
        _check_slopes(node, parts, reach)
    function = OPERATORS[node.op]
    return ByDistance(reach, lambda d: np.asarray(function(*(p.at(d) for p in parts))))


def _cast(inner: ByDistance, dtype: np.dtype[np.generic] | type[np.generic]) -> ByDistance:
    if dtype is None:
        raise NotAttentionError("its mask is cast to a type that is not known")
    kind = np.dtype(dtype).kind
    if kind == "b":
        return ByDistance(inner.reach, lambda d: inner.at(d) != 0)
    return inner if kind == "f" else ByDistance(inner.reach, lambda d: np.trunc(inner.at(d)))


def _check_slopes(node: gs.Node, parts: Sequence[ByDistance], reach: int) -> None:
    """Check that numbers that rise with the distance rise by one a token at least.

    Only then is where they meet another number not beyond the reach.
    """
    distances = _distances(reach)
    values = [part.at(distances) for part in parts]
    flat = [v for v in values if (v[1:] == v[:-1])[[0, -1]].all()]
    whole = [v for v in values if (v == v[0]).all() and (abs(v[0]) >= 1 or v[0] == 0)]
    if len(flat) < len(values) and not whole:
        raise NotAttentionError(f"{node.op} {node.name} makes fractions of distances")


def _triangle(e: Evaluator, node: gs.Node) -> ByDistance:
    """Return a triangle of a matrix."""
    inner, offset = _read(e, node.inputs[0]), e.ints(node, 1, "k") or [0]
    given = len(node.inputs) > 1 and not node.inputs[1].is_empty()
    if given and not e.is_constant(node.inputs[1]):
        raise NotAttentionError("the diagonal of its triangle depends on data")
    # Column s of row t is above diagonal k where s - t >= k.
    upper, k = node.attrs.get("upper", 1), offset[0]

    def at(d: np.ndarray) -> np.ndarray:
        return np.where(-d >= k if upper else -d <= k, inner.at(d), 0)

    return ByDistance(inner.reach + abs(k) + 1, at)


def _clipped(e: Evaluator, node: gs.Node) -> ByDistance:
    """Return a matrix whose entries are held between two numbers."""
    inner, *bounds = [_read(e, t) if not t.is_empty() else None for t in node.inputs]
    assert inner is not None
    least, most = [*bounds, None, None][:2]
    reach = inner.reach + sum(bound.reach for bound in (least, most) if bound is not None)

    def at(d: np.ndarray) -> np.ndarray:
        low = -np.inf if least is None else least.at(d)
        return np.clip(inner.at(d), low, np.inf if most is None else most.at(d))

    return ByDistance(reach, at)


def _looked_up(e: Evaluator, node: gs.Node) -> ByDistance:
    """Return entries of a stored vector, at places that the distance decides."""
    table, index = e.values.numbers(node.inputs[0]), node.inputs[1]
    if node.op == "GatherND":  # its places are rows of numbers, of one number here
        rows, sizes = producer(index), e.sizes(index)
        if rows is None or rows.op != "Unsqueeze" or not sizes or sizes[-1] != Size(1):
            raise NotAttentionError(f"{node.name} reads places of several numbers")
        index = rows.inputs[0]
    if table is None or table.ndim != 1:
        raise NotAttentionError(f"{node.name} does not read a stored vector at distances")
    places = _read(e, index)
    distances = _distances(places.reach)
    found = places.at(distances)
    # Beyond its reach a place is what it is there only where it does not rise with the distance.
    flat = np.array_equal(found[[0, -1]], found[[1, -2]])
    if not flat or (found < -len(table)).any() or (found >= len(table)).any():
        raise NotAttentionError(f"{node.name} reads places outside its vector at some distances")
    return ByDistance(places.reach, lambda d: table[places.at(d).astype(np.int64)])


READERS: dict[str, Callable[[Evaluator, gs.Node], ByDistance]] = {
    "Trilu": _triangle,
    "Clip": _clipped,
    "Gather": _looked_up,
    "GatherND": _looked_up,
}
"""Operators of more than entries."""


def _keeps_matrix(e: Evaluator, node: gs.Node) -> bool:
    """Return whether the last two dims of a value are those of what it is made of.

    Of a stored matrix the first rows and columns may be taken, as many of both.
    """
    before, after = e.sizes(node.inputs[0]), e.sizes(node.outputs[0])
    if before is None or after is None or min(len(before), len(after)) < 2:
        return False
    if node.op != "Slice":
        return before[-2:] == after[-2:] and before[-1] != Size(1) != before[-2]
    start, steps = e.ints(node, 1, "starts"), e.ints(node, 4, "steps") or [1]
    return start is not None and not any(start) and set(steps) == {1}


def _stored(value: np.ndarray) -> ByDistance:
    """Return a stored matrix of equal diagonals, which go on as the outermost ones are."""
    square = value.ndim > 1 and value.shape[-1] == value.shape[-2] == value.size**0.5
    matrix = value.reshape(value.shape[-2:]) if square else value
    if not square or not np.array_equal(matrix[1:, 1:], matrix[:-1, :-1]):
        raise NotAttentionError("its stored mask has not one value on each diagonal")
    last = len(matrix) - 1
    # Entries by distance, from -last to last: the first row backwards, then the first column.
    entries = np.concatenate([matrix[0, ::-1], matrix[1:, 0]])
    return ByDistance(last, lambda d: entries[np.clip(d, -last, last) + last])


def _is_of_positions(form: Form) -> bool:
    """Return whether a matrix is finite, of orders and positions of its rows and columns alone."""
    if len(form.dims) < 2 or any(len(index) != 1 for index in form.dims[-2:]):
        return False
    own = {*form.dims[-2], *form.dims[-1]}
    kinds = (PositionOrder, Iota)
    return all(
        math.isfinite(term.coefficient)
        and all(isinstance(f, kinds) for f in term.factors)
        and term.axes <= own
        and (abs(term.coefficient) >= 1 or not term.of(Iota))
        for term in form.terms
    )


def _of_form(form: Form) -> ByDistance:
    (row,), (column,) = form.dims[-2:]

    def value(factor: Factor, place: dict[object, np.ndarray]) -> np.ndarray:
        if isinstance(factor, PositionOrder):
            (r,), (c,) = factor.row, factor.column
            return np.asarray(place[c] <= place[r] + factor.offset)
        assert isinstance(factor, Iota)
        return place[factor.index[0]]

    def product(term: Term, place: dict[object, np.ndarray]) -> np.ndarray:
        result = np.full(len(place[row]), term.coefficient)
        for factor in term.factors:
            result = result * value(factor, place)
        return result

    def at(d: np.ndarray) -> np.ndarray:
        tried = []
        for shift in SHIFTS:
            place: dict[object, np.ndarray] = {row: d + shift, column: np.full(len(d), shift)}
            tried.append(sum((product(t, place) for t in form.terms), np.zeros(len(d))))
        # A value of the distance alone is the same wherever the key is.
        if not all(np.array_equal(tried[0], other) for other in tried):
            raise NotAttentionError("its mask depends on the place of a token, not on distances")
        return tried[0]

    offsets = sum(abs(f.offset) + 1 for t in form.terms for f in t.of(PositionOrder))
    numbers = sum(abs(t.coefficient) for t in form.terms if not t.factors)
    return ByDistance(offsets + math.ceil(numbers), at)
