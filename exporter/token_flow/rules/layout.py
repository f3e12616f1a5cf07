"""Operators that permute, merge or split axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, fixed, regroup, size_of, span_of
from linexport.token_flow.broadcasting import pair_of, untimed
from linexport.token_flow.interpreter import Interpreter, rule
from linexport.token_flow.lengths import ONE, Length, of, product
from linexport.token_flow.masks import Mask
from linexport.token_flow.values import Affine, MixingError, TokenValue


@rule("Transpose")
def transpose(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow axes in another order."""
    given = a.value(node.inputs[0])
    axes = given.known_axes
    return [transposed(given, node.attrs.get("perm") or [*range(len(axes))][::-1])]


def transposed(given: TokenValue, order: Sequence[int]) -> TokenValue:
    """Return a value with its axes in another order."""
    axes = tuple(given.known_axes[i] for i in order)
    numbers = None if given.numbers is None else given.numbers.transpose(order)
    form = given.form and Affine(given.form.number, tuple(given.form.by[i] for i in order))
    pair, mask = pair_of(given.known_axes), given.mask
    if pair is not None and order.index(pair[0]) > order.index(pair[1]):
        mask = mask.turned()
    tag = given.tag and given.tag.transposed(order)
    return replace(given, axes=axes, numbers=numbers, form=form, mask=mask, tag=tag)


@rule("Reshape")
def reshape(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow elements in the same order, with axes of other sizes."""
    given = a.value(node.inputs[0])
    own = [size_of(axis) for axis in given.known_axes]
    target = a.lengths(node, 1)
    if target is None:
        target = [of(n) for n in node.attrs["shape"]]
    keeps = not node.attrs.get("allowzero", 0)
    target = [own[i] if keeps and size == of(0) else size for i, size in enumerate(target)]
    sizes = _whole(target, product(own))
    return [reshaped(given if ONE in sizes else _without_single_tokens(a, given), sizes)]


def _without_single_tokens(a: Interpreter, given: TokenValue) -> TokenValue:
    """Return a value of which axes of one token are no more than its first or last element."""
    for place, axis in enumerate(given.known_axes):
        span = span_of(axis)
        if span is not None and span.size == ONE:
            given = untimed(a, given, place, span)
    return given


def _whole(target: Sequence[Length], total: Length) -> list[Length]:
    """Return sizes, that which is -1 computed."""
    others = product(size for size in target if size != of(-1))
    return [total // others if size == of(-1) else size for size in target]


def reshaped(given: TokenValue, sizes: Sequence[Length]) -> TokenValue:
    """Return a value with axes of other sizes.

    Raises:
        MixingError: which axis has the tokens then is not known.
    """
    found = regroup(given.known_axes, sizes)
    if found is None:
        if given.spans or any(f for axis in given.known_axes for f in axis if f.step):
            raise MixingError(
                "puts tokens into another shape in a way that cannot be followed",
                "reshape tokens to (chunks, tokens of a chunk) of a fixed size, and back",
            )
        found = [fixed(size) for size in sizes]
    return with_axes(given, found)


def with_axes(given: TokenValue, axes: Sequence[Axis]) -> TokenValue:
    """Return a value whose elements, in the same order, have other axes."""
    before = [(axis, place) for place, axis in enumerate(given.known_axes) if axis]
    after = [(axis, place) for place, axis in enumerate(axes) if axis]
    same = [axis for axis, _ in before] == [axis for axis, _ in after]
    form, mask, by_call = given.linear(), Mask(), given.by_call
    tag = given.tag and given.tag.regrouped(axes)
    if form is not None and same:
        by = [0] * len(axes)
        for (_, old), (_, new) in zip(before, after, strict=True):
            by[new] = form.by[old]
        form = Affine(form.number, tuple(by))
    elif form is not None:
        by_call = by_call or (any(form.by) and bool(form.number.symbols))
        form = None if any(form.by) else Affine(form.number, (0,) * len(axes))
    pairs = pair_of(given.known_axes), pair_of(axes)
    if None not in pairs:
        mask = given.mask
    numbers = given.numbers
    if numbers is not None:
        counts = [size_of(axis).number for axis in axes]
        numbers = None if None in counts else numbers.reshape([int(n or 0) for n in counts])
    if given.numbers is not None and numbers is None and form is None:
        by_call = by_call or given.without_numbers().by_call
    found = replace(given, axes=tuple(axes), form=form, mask=mask, tag=tag)
    return replace(found, numbers=numbers, by_call=by_call)


@rule("Unsqueeze")
def unsqueeze(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow axes of size 1 that are put in."""
    given = a.value(node.inputs[0])
    places = a.integers(node, 1, "axes") or []
    rank = given.rank + len(places)
    new = {place % rank for place in places}
    left = iter(given.known_axes)
    return [with_axes(given, [() if place in new else next(left) for place in range(rank)])]


@rule("Squeeze")
def squeeze(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow axes of size 1 that are taken out."""
    given = a.value(node.inputs[0])
    axes, places = given.known_axes, a.integers(node, 1, "axes")
    if places is None:
        places = [place for place, axis in enumerate(axes) if size_of(axis) == ONE]
    gone = {place % len(axes) for place in places}
    if any(size_of(axes[place]) != ONE for place in gone):
        raise MixingError("takes out an axis whose size is not known to be 1")
    for place in gone:
        span = span_of(axes[place])
        given = given if span is None else untimed(a, given, place, span)
    axes = given.known_axes
    return [with_axes(given, [axis for place, axis in enumerate(axes) if place not in gone])]


@rule("Flatten")
def flatten(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow axes that are put together to two."""
    given = a.value(node.inputs[0])
    sizes = [size_of(axis) for axis in given.known_axes]
    place = node.attrs.get("axis", 1) % (len(sizes) + 1)
    return [reshaped(given, [product(sizes[:place]), product(sizes[place:])])]


@rule("Tile")
def tile(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow elements that are repeated."""
    given, counts = a.value(node.inputs[0]), a.lengths(node, 1) or []
    axes = list(given.known_axes)
    for place, times in enumerate(counts):
        if times == ONE:
            continue
        if any(f.step for f in axes[place]):
            raise MixingError("repeats tokens")
        axes[place] = fixed(size_of(axes[place]) * times) if axes[place] else a.axis_of(times)
    found = replace(given.without_numbers(), axes=tuple(axes))
    number = given.uniform
    if isinstance(number, Length):
        found = replace(found, form=Affine(number, (0,) * len(axes)))
    else:
        a.check_same_everywhere(given)
    return [found]
