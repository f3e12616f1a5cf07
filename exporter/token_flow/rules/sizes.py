"""Sizes, numbers and positions: Shape, Range, Expand, and tensors that are the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, fixed, size_of, span_of
from linexport.token_flow.broadcasting import align, elementwise, pair_of
from linexport.token_flow.interpreter import Interpreter, rule
from linexport.token_flow.lengths import ONE, ZERO, Length, of, product
from linexport.token_flow.masks import Mask, combined, constant, linear
from linexport.token_flow.values import (
    SMALL,
    Affine,
    MixingError,
    TokenValue,
    array,
    lengths,
    whole,
)


@rule("Shape")
def shape(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow the sizes of a tensor, which do not depend on its elements."""
    axes = a.value(node.inputs[0]).axes
    stated = node.inputs[0].shape
    if axes is None and stated is not None and not any(size in (None, "") for size in stated):
        axes = tuple(a.axis_of(a.size(size)) for size in stated)
    if axes is None:
        return [TokenValue((fixed(a.size(f"rank of {node.inputs[0].name}")),))]
    sizes = [size_of(axis) for axis in axes]
    found = sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))]
    return [TokenValue((fixed(of(len(found))),), numbers=lengths(found))]


@rule("Size")
def size(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow the number of elements."""
    axes = a.value(node.inputs[0]).known_axes
    return [TokenValue((), numbers=array(product(size_of(axis) for axis in axes)))]


@rule("Constant")
def stored(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a constant that is an attribute."""
    for name, held in node.attrs.items():
        if name.startswith("value"):
            values = np.asarray(getattr(held, "values", held))
            axes = tuple(fixed(of(size)) for size in values.shape)
            known = values.size <= SMALL and values.dtype.kind in "iubf"
            return [TokenValue(axes, numbers=array(values) if known else None)]
    raise MixingError("is a constant of an unknown kind")


@rule("ConstantOfShape")
def constant_of_shape(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow one number at every place."""
    sizes = a.lengths(node, 0) or []
    held = node.attrs.get("value")
    number = 0.0 if held is None else np.asarray(held.values).flat[0].item()
    return [same_everywhere([a.axis_of(size) for size in sizes], number)]


def same_everywhere(axes: Sequence[Axis], number: float) -> TokenValue:
    """Return a value all of whose elements are one number."""
    sizes = [size_of(axis).number for axis in axes]
    known = None not in sizes and np.prod([n or 0 for n in sizes]) <= SMALL
    whole = isinstance(number, int | bool) or float(number).is_integer()
    if known:
        shape = [n or 0 for n in sizes]
        values = np.full(shape, int(number)) if whole else np.full(shape, number)
        return TokenValue(tuple(axes), numbers=array(values))
    form = Affine(of(int(number)), (0,) * len(axes)) if whole else None
    return TokenValue(tuple(axes), form=form, mask=constant(number))


@rule("Expand")
def expand(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a tensor that is repeated along axes of size 1."""
    given, sizes = a.value(node.inputs[0]), a.lengths(node, 1) or []
    known = _known(given, sizes)
    if known is not None:
        return [known]
    # An axis that is there already has the tokens that it has.
    own = given.known_axes[-len(sizes) :] if sizes else ()
    own = ((),) * (len(sizes) - len(own)) + tuple(own)
    target = [axis or a.axis_of(size) for axis, size in zip(own, sizes, strict=True)]
    ones = TokenValue(tuple(target), form=Affine(ONE, (0,) * len(target)))
    found = elementwise(a, "Mul", [given, ones])
    return [replace(found, tag=None)]


def _known(given: TokenValue, sizes: Sequence[Length]) -> TokenValue | None:
    """Return few numbers that are repeated a number of times."""
    counts = [size.number for size in sizes]
    if given.numbers is None or None in counts:
        return None
    try:
        shape = np.broadcast_shapes(given.numbers.shape, tuple(int(n or 0) for n in counts))
    except ValueError:
        return None
    if np.prod(shape) > SMALL:
        return None
    axes = tuple(fixed(of(n)) for n in shape)
    return TokenValue(axes, numbers=np.broadcast_to(given.numbers, shape).copy())


@rule("Range")
def counted(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow numbers that are counted: positions, where there are as many as tokens."""
    ends = [a.value(t) for t in node.inputs]
    numbers = [whole(v.uniform) for v in ends]
    if None in numbers:
        return [_unknown_range(a, node, ends)]
    start, limit, delta = (n for n in numbers if n is not None)
    step = delta.number
    if not step:
        raise MixingError("counts in steps that are not known")
    size = (limit - start) // delta if step > 0 else (start - limit) // of(-step)
    if (count := size.number) is not None and count <= SMALL:
        values = [start + of(step * i) for i in range(max(count, 0))]
        return [TokenValue((fixed(of(max(count, 0))),), numbers=lengths(values))]
    axis = a.axis_of(size)
    span = span_of(axis)
    first = span.start if span is not None else ZERO
    if len(axis) != 1 or (span is not None and span.step != 1):
        raise MixingError("counts to a number that is not that of the tokens")
    # Element i is token first + i, so that start + step i is start + step (token - first).
    return [TokenValue((axis,), form=Affine(start - of(step) * first, (step,)))]


def _unknown_range(a: Interpreter, node: gs.Node, ends: Sequence[TokenValue]) -> TokenValue:
    """Return a range of numbers that are not whole, or not known."""
    a.check_same_everywhere(*ends)
    stated = a.stated(node.outputs[0])
    if any(v.tokens for v in ends) or stated.spans or stated.axes is None:
        raise MixingError("counts between numbers that are not known")
    return replace(stated, tokens=False)


@rule("EyeLike")
def eye_like(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow ones on a diagonal."""
    axes = a.value(node.inputs[0]).known_axes
    return [TokenValue(axes, mask=diagonals(a, axes, "Equal", node.attrs.get("k", 0)))]


@rule("Trilu")
def trilu(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a triangle: entries whose column is at most k behind their row, or at least."""
    given = a.value(node.inputs[0])
    offset = a.optional(node, 1)
    number = ZERO if offset is None else offset.uniform
    upper = node.attrs.get("upper", 1)
    if not isinstance(number, Length) or number.number is None:
        raise MixingError("is a triangle from a diagonal that is not known before it runs")
    kept = diagonals(
        a, given.known_axes, "LessOrEqual" if upper else "GreaterOrEqual", number.number
    )
    found = align(a, [given])
    a.check_same_everywhere(given)
    own = given.as_mask()
    return [
        TokenValue(
            found.axes,
            mask=combined("Mul", [kept, own]) if given.spans else Mask(),
            time=given.time,
            tokens=given.tokens,
            faults=given.faults,
        )
    ]


def diagonals(a: Interpreter, axes: Sequence[Axis], comparison: str, number: int) -> Mask:
    """Return which entries are on one side of a diagonal: column - row compared with a number.

    Raises:
        MixingError: that depends on where a sequence is cut.
    """
    last = [axes[-2], axes[-1]]
    if not any(span_of(axis) or len(axis) > 1 for axis in last):
        return Mask()
    pair = pair_of(axes)
    rows, columns = (span_of(axis) for axis in last)
    if rows is None or columns is None or pair is None:
        raise MixingError("is a triangle of tokens and something else")
    # Row i is token r + i, column j token c + j: i - j is the distance less r - c.
    distance = (rows.start - columns.start).number
    if distance is None:
        raise MixingError(
            "is a triangle whose rows begin at another token than its columns",
            "compare positions instead: rows of torch.arange(past, past + x.shape[1])",
        )
    return combined(comparison, [linear(1, -distance), constant(-number)])
