"""Operators that take elements by their place, or put them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, Span, fixed, has_tokens, size_of, span_of
from linexport.token_flow.broadcasting import align
from linexport.token_flow.interpreter import FlowKind, Interpreter, rule
from linexport.token_flow.lengths import ZERO, Length, of
from linexport.token_flow.rules.pieces import HISTORY
from linexport.token_flow.values import SMALL, Affine, MixingError, Time, TokenValue

COMPUTED = "takes tokens at computed places"


@rule("Gather")
def gather(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow rows that are looked up."""
    given, index = a.inputs(node)
    place = node.attrs.get("axis", 0) % given.rank
    axis = given.known_axes[place]
    if has_tokens(axis):
        return [_of_tokens(a, given, index, place)]
    known = _of_numbers(given, index, place)
    if known is not None:
        return [known]
    a.check_aligned(axis)
    if given.uniform is None:
        a.check_same_everywhere(index)
    a.check_same_everywhere(given)
    axes = (*given.known_axes[:place], *index.known_axes, *given.known_axes[place + 1 :])
    return [_looked_up(given, index, axes)]


def _looked_up(given: TokenValue, index: TokenValue, axes: tuple[Axis, ...]) -> TokenValue:
    """Return rows that are looked up along an axis without tokens."""
    times = {given.time, index.time} - {Time.ALWAYS}
    if len(times) > 1 or (times and any(map(has_tokens, axes))):
        raise MixingError("combines every token with a value from before the call, or from its end")
    return TokenValue(
        axes,
        time=next(iter(times), Time.ALWAYS),
        tokens=given.tokens or index.tokens,
        faults=given.faults | index.faults,
    )


def _of_numbers(given: TokenValue, index: TokenValue, place: int) -> TokenValue | None:
    """Return known elements at known places."""
    if given.numbers is None or index.numbers is None or index.numbers.size > SMALL:
        return None
    places = [n.number if isinstance(n, Length) else None for n in index.numbers.flat]
    if None in places:
        return None
    taken = np.asarray(places, np.int64).reshape(index.numbers.shape)
    if taken.size and (np.abs(taken + 0.5) > given.numbers.shape[place]).any():
        return None
    found = np.empty(
        (*given.numbers.shape[:place], *taken.shape, *given.numbers.shape[place + 1 :]), object
    )
    found[...] = given.numbers.take(taken, place)
    return TokenValue(tuple(fixed(of(n)) for n in found.shape), numbers=found, faults=given.faults)


def _of_tokens(a: Interpreter, given: TokenValue, index: TokenValue, place: int) -> TokenValue:
    """Return tokens at places that are known from their own."""
    span = span_of(given.known_axes[place])
    if span is None or span.step != 1 or index.tokens:
        raise MixingError(COMPUTED, HISTORY)
    a.check_same_everywhere(given)
    before, after = given.known_axes[:place], given.known_axes[place + 1 :]
    form = index.linear()
    if form is None or not index.spans:
        if index.numbers is None:
            raise MixingError(COMPUTED, HISTORY)
        return _at_ends(a, given, index, place, span)
    reached = _windows(a, index, form, span)
    found = replace(given.without_numbers(), axes=(*before, *index.known_axes, *after))
    if reached:
        a.note(FlowKind.WINDOW, reached, span.rows)
    return found


def _windows(a: Interpreter, index: TokenValue, form: Affine, span: Span) -> int:
    """Return how far tokens at places linear in indices are behind the index's own.

    Raises:
        MixingError: that depends on where a sequence is cut, or is further than there are rows.
    """
    axes = index.known_axes
    own = [i for i, axis in enumerate(axes) if has_tokens(axis)]
    spans = [span_of(axes[i]) for i in own]
    first = spans[0] if len(spans) == 1 else None
    if first is None or form.by[own[0]] != 1 or first.step != 1:
        raise MixingError(COMPUTED, HISTORY)
    # Element i of the axis is token start + i: at n + t it is start + n + t.
    nearest = (span.start + form.number).number
    if nearest is None:
        raise MixingError("takes tokens at a distance that depends on where a sequence is cut")
    sizes = [size_of(axis).number for axis in axes]
    farthest = nearest
    for place, by in enumerate(form.by):
        if by and place != own[0]:
            size = sizes[place]
            if size is None:
                raise MixingError(COMPUTED, HISTORY)
            farthest += min(by * (size - 1), 0)
            nearest += max(by * (size - 1), 0)
    if nearest > 0:
        raise MixingError(f"reads {nearest} tokens ahead")
    # Places before the first row would be counted from the last one.
    ends = (first.start + of(farthest) - span.start, span.stop - (first.stop + of(nearest)))
    inside = all(end.least is not None and end.least >= 0 for end in ends)
    missing = (span.valid_from - (first.start + of(farthest))).number
    real = span.valid_from.number is not None or (missing is not None and missing <= 0)
    if not (inside and real):
        raise MixingError(f"looks back {-farthest} tokens, before the first of a call", HISTORY)
    return -farthest


def _at_ends(
    a: Interpreter, given: TokenValue, index: TokenValue, place: int, span: Span
) -> TokenValue:
    """Return tokens at the beginning or the end of a call."""
    times = set()
    for number in [] if index.numbers is None else index.numbers.flat:
        if not isinstance(number, Length):
            raise MixingError(COMPUTED, HISTORY)
        back = (-number).is_at_least_zero and number != ZERO
        token = (span.stop if back else span.start) + number
        behind = (a.end - token).number
        if token.number is not None:
            times.add(Time.ALWAYS)
        elif behind is not None and behind > 0 and _is_there(span, token):
            times.add(Time.AFTER)
        elif (a.past - token).number is not None and _is_there(span, token):
            if (a.past - token).number <= 0:
                raise MixingError(
                    "reads tokens at the beginning of each call",
                    "later tokens must not read the first ones of a call",
                )
            times.add(Time.BEFORE)
        else:
            raise MixingError("takes tokens by their place in a call, of which there may be fewer")
    if len(times) != 1:
        raise MixingError("takes tokens from both ends of a call")
    axes = (*given.known_axes[:place], *index.known_axes, *given.known_axes[place + 1 :])
    if any(map(has_tokens, axes)) and times != {Time.ALWAYS}:
        raise MixingError("combines every token with a value from before the call, or from its end")
    return replace(given.without_numbers(), axes=axes, time=times.pop())


def _is_there(span: Span, token: Length) -> bool:
    least = (token - span.start).least
    return least is not None and least >= 0


@rule("GatherElements")
def gather_elements(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow an element for each index, of which all other places are its own."""
    given, index = a.inputs(node)
    place = node.attrs.get("axis", 0) % given.rank
    axis, kept = given.known_axes[place], index.known_axes[place]
    if has_tokens(axis):
        form, span = index.linear(), span_of(axis)
        if form is None or span is None or index.tokens or span.step != 1:
            raise MixingError(COMPUTED, HISTORY)
        others = [
            TokenValue(((),) * i + (x,)) for i, x in enumerate(index.known_axes) if i != place
        ]
        reached = _windows(a, index, form, span)
        a.check_same_everywhere(given)
        rest = replace(given.without_numbers(), axes=_without(given, place))
        met = align(a, [rest, *others])
        if reached:
            a.note(FlowKind.WINDOW, reached, span.rows)
        axes = (*met.axes[:place], kept, *met.axes[place + 1 :])
        return [replace(given.without_numbers(), axes=axes)]
    a.check_aligned(axis)
    a.check_same_everywhere(given, index)
    parts = [replace(v.without_numbers(), axes=_without(v, place)) for v in (given, index)]
    met = align(a, parts)
    axes = (*met.axes[:place], kept, *met.axes[place + 1 :])
    return [
        TokenValue(
            axes,
            time=met.time,
            tokens=given.tokens or index.tokens,
            faults=given.faults | index.faults,
        )
    ]


def _without(value: TokenValue, place: int) -> tuple[Axis, ...]:
    return (*value.known_axes[:place], (), *value.known_axes[place + 1 :])


@rule("ScatterElements", "Scatter")
def scatter_elements(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow elements that are put at places along an axis without tokens."""
    given, index, updates = a.inputs(node)
    place = node.attrs.get("axis", 0) % given.rank
    values = (given, index, updates)
    if any(has_tokens(v.known_axes[place]) for v in values):
        raise MixingError("puts values at computed places of tokens")
    a.check_same_everywhere(*values)
    parts = [replace(v.without_numbers(), axes=_without(v, place)) for v in values]
    met = align(a, parts)
    axes = (*met.axes[:place], given.known_axes[place], *met.axes[place + 1 :])
    return [
        TokenValue(
            axes,
            time=met.time,
            tokens=any(v.tokens for v in values),
            faults=frozenset().union(*(v.faults for v in values)),
        )
    ]


@rule("GatherND")
def gather_nd(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow elements at several places at once, along axes without tokens."""
    given, index = a.inputs(node)
    batch = node.attrs.get("batch_dims", 0)
    depth = size_of(index.known_axes[-1]).number
    if depth is None:
        raise MixingError("takes elements at places that are not known")
    if any(map(has_tokens, given.known_axes[batch : batch + depth])):
        raise MixingError(COMPUTED, HISTORY)
    a.check_same_everywhere(given, index)
    rest = given.known_axes[batch + depth :]
    outer = [replace(v.without_numbers(), axes=v.known_axes[:batch]) for v in (given, index)]
    met = align(a, outer) if batch else None
    first = met.axes if met is not None else ()
    return [_looked_up(given, index, (*first, *index.known_axes[batch:-1], *rest))]


@rule("ScatterND")
def scatter_nd(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow elements that are put at several places, of what has no tokens."""
    values = a.inputs(node)
    if any(v.spans for v in values):
        raise MixingError("puts values at computed places of tokens")
    a.check_same_everywhere(*values)
    found = values[0].without_numbers()
    times = {v.time for v in values} - {Time.ALWAYS}
    if len(times) > 1:
        raise MixingError("puts values from before a call and after it together")
    faults = frozenset().union(*(v.faults for v in values))
    tokens = any(v.tokens for v in values)
    return [replace(found, time=next(iter(times), Time.ALWAYS), tokens=tokens, faults=faults)]


@rule("NonZero", "Unique", "Compress", "NonMaxSuppression")
def chosen(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a choice whose number is not known, of what has no tokens."""
    values = a.inputs(node)
    if any(v.spans or v.tokens for v in values):
        raise MixingError("gives a number of elements that depends on the tokens")
    return [replace(a.stated(t), tokens=False) for t in node.outputs]
