"""Operators that cut tokens off, or put others in front of them or behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, Fixed, Span, fixed, has_tokens, size_of, span_of
from linexport.token_flow.broadcasting import align
from linexport.token_flow.interpreter import FlowKind, Interpreter, Join, rule
from linexport.token_flow.lengths import ZERO, Length, of
from linexport.token_flow.masks import Mask
from linexport.token_flow.values import Affine, MixingError, Tag, Time, TokenValue

END = 1 << 31
"""Numbers from here on stand for the end of an axis, as exporters write it."""

FILLED = "puts rows of zeros, weights or another input in front of the tokens of each call"
HISTORY = (
    "rows of earlier tokens must come from a state: a delay or a difference by a constant does, "
    "and rows that are an input, if they are read at constant places and the last are returned"
)


@rule("Slice")
def sliced(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a part of some axes."""
    given = a.value(node.inputs[0])
    starts = _bounds(a, node, 1, "starts")
    ends = _bounds(a, node, 2, "ends")
    axes = a.integers(node, 3, "axes") or list(range(len(starts)))
    steps = a.integers(node, 4) or [1] * len(starts)
    for place, start, end, step in zip(axes, starts, ends, steps, strict=True):
        given = cut(a, given, place % given.rank, start, end, step)
    return [given]


def _bounds(a: Interpreter, node: gs.Node, place: int, attribute: str) -> list[Length]:
    if attribute in node.attrs:
        return [of(n) for n in node.attrs[attribute]]
    return a.lengths(node, place) or []


def cut(
    a: Interpreter, given: TokenValue, place: int, start: Length, end: Length, step: int
) -> TokenValue:
    """Return a value of which a part along one axis is taken.

    Raises:
        MixingError: which tokens that are depends on where a sequence is cut.
    """
    axis = given.known_axes[place]
    span = span_of(axis)
    if start == ZERO and step == 1 and _is_end(end, size_of(axis)):
        return given
    if span is not None:
        return _tokens(a, given, place, span, start, end, step)
    if has_tokens(axis):
        raise MixingError("cuts an axis of sequences and tokens")
    return _elements(a, given, place, start, end, step)


def _is_end(end: Length, size: Length) -> bool:
    return end == size or (end.number or 0) >= END


def _tokens(
    a: Interpreter, given: TokenValue, place: int, span: Span, start: Length, end: Length, step: int
) -> TokenValue:
    if step < 0:
        raise MixingError("runs backwards over tokens", "a causal model reads them forwards")
    if span.extra:
        ends = (start, end - span.size if end.is_at_least_zero else end)
        if ends != (ZERO, of(-span.extra)) or step != 1:
            raise MixingError("takes a part of tokens and of what is behind them")
        axes = (
            *given.known_axes[:place],
            (replace(span, extra=0),),
            *given.known_axes[place + 1 :],
        )
        return replace(given, axes=axes, tag=None)
    each = of(span.step)
    first = span.start + each * _place(start, span.size, True)
    last = (
        span.stop if _is_end(end, span.size) else span.start + each * _place(end, span.size, False)
    )
    made = span.cut(first, last, a.number)
    if step > 1:
        chunk = of(step * span.step)
        if (last - first).divided(chunk) is None:
            raise MixingError("takes every few tokens, counted from the first of a call")
        aligned = span.aligned and first.divided(chunk) is not None
        if not aligned:
            raise MixingError("takes every few tokens, counted from the first of a call")
        made = replace(made, step=chunk.number or 1)
    axes = (*given.known_axes[:place], (made,), *given.known_axes[place + 1 :])
    tag = given.tag and given.tag.resized(place, made.size)
    return replace(given, axes=axes, numbers=None, tag=tag)


def _place(bound: Length, size: Length, is_start: bool) -> Length:
    """Return a bound counted from the beginning.

    Raises:
        MixingError: in short calls it is another.
    """
    if bound.is_at_least_zero:
        found = bound
    elif (-bound).is_at_least_zero:
        found = size + bound
    else:
        raise MixingError("cuts tokens at a size that is not known")
    # A bound beyond the axis is its end: in a call of few tokens more than was there is meant.
    inside = (size - found).least is not None and (size - found).least >= 0
    if not inside or (is_start and (found.least is None or found.least < 0)):
        raise MixingError(
            "takes tokens by their place in a call, of which there may be fewer", HISTORY
        )
    return found


def _elements(
    a: Interpreter, given: TokenValue, place: int, start: Length, end: Length, step: int
) -> TokenValue:
    """Return a part of an axis without tokens."""
    axis = given.known_axes[place]
    size = size_of(axis)
    a.check_aligned(axis)
    count, bounds = size.number, (start.number, end.number)
    form, numbers = given.linear(), given.numbers
    if count is not None and None not in bounds:
        kept = range(count)[slice(bounds[0], bounds[1], step)]
        made, begin = fixed(of(len(kept))), of(kept.start)
        if numbers is not None:
            index = (slice(None),) * place + (slice(bounds[0], bounds[1], step),)
            numbers = numbers[index]
    else:
        first = ZERO if start == ZERO else start if start.is_at_least_zero else size + start
        last = size if _is_end(end, size) else end if end.is_at_least_zero else size + end
        made, begin, numbers = a.axis_of((last - first) // of(abs(step))), first, None
        if (has_tokens(made) or (last - first).symbols & a.symbols) and given.uniform is None:
            raise MixingError(
                "takes the first rows of a table in every call, as many as there are tokens",
                "rows that positions look up, table[torch.arange(x.shape[1])], get an offset",
            )
    if form is not None:
        by = form.by[place]
        form = Affine(
            form.number + begin * of(by), (*form.by[:place], by * step, *form.by[place + 1 :])
        )
    axes = (*given.known_axes[:place], made, *given.known_axes[place + 1 :])
    return replace(given, axes=axes, form=form, numbers=numbers, tag=None)


@rule("Split")
def split(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow parts of an axis."""
    given = a.value(node.inputs[0])
    place = node.attrs.get("axis", 0) % given.rank
    size = size_of(given.known_axes[place])
    sizes = None
    if "split" in node.attrs:
        sizes = [of(n) for n in node.attrs["split"]]
    sizes = sizes or a.lengths(node, 1) or _equal(size, len(node.outputs))
    found, start = [], ZERO
    for own in sizes:
        found.append(cut(a, given, place, start, start + own, 1))
        start = start + own
    return found


def _equal(size: Length, parts: int) -> list[Length]:
    """Return the sizes of equal parts, the last of which may be smaller."""
    each = size.divided(of(parts))
    if each is not None:
        return [each] * parts
    if size.number is None:
        raise MixingError("splits tokens into parts that cannot be followed")
    each = of(-(-size.number // parts))
    return [*[each] * (parts - 1), size - each * of(parts - 1)]


@rule("Concat")
def concat(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow tensors side by side: rows of a state, or others, in front of tokens."""
    parts = a.inputs(node)
    place = node.attrs["axis"] % parts[0].rank
    if all(p.numbers is not None for p in parts):
        numbers = np.concatenate([p.numbers for p in parts if p.numbers is not None], place)
        axes = tuple(fixed(of(size)) for size in numbers.shape)
        return [TokenValue(axes, numbers=numbers)]
    along = [p.known_axes[place] for p in parts]
    if len(parts) == 1:
        return parts
    if not any(has_tokens(axis) for axis in along):
        return [_joined(a, parts, place, fixed(_total(along)))]
    known = [span_of(axis) for axis in along]
    if known[0] is not None and all(s == known[0] for s in known):
        # The same tokens several times: as several heads in front of them in one axis.
        found = _joined(a, parts, place, (Fixed(of(len(parts))), known[0]))
        same = all(p.mask == parts[0].mask for p in parts)
        return [replace(found, mask=parts[0].mask) if same else found]
    if any(s is None and has_tokens(axis) for s, axis in zip(known, along, strict=True)):
        raise MixingError("joins axes of sequences and tokens")
    return [_tokens_joined(a, parts, place, known)]


def _total(axes: Sequence[Axis]) -> Length:
    total = ZERO
    for axis in axes:
        total = total + size_of(axis)
    return total


def _joined(a: Interpreter, parts: Sequence[TokenValue], place: int, axis: Axis) -> TokenValue:
    """Return values side by side, whose other axes meet as those of entries do."""
    others = [
        replace(
            p.without_numbers() if p.uniform is None else p,
            axes=(*p.known_axes[:place], (), *p.known_axes[place + 1 :]),
            numbers=None,
        )
        for p in parts
    ]
    a.check_same_everywhere(*parts)
    met = align(a, others)
    axes = (*met.axes[:place], axis, *met.axes[place + 1 :])
    return TokenValue(
        axes,
        time=met.time,
        tokens=any(p.tokens for p in parts),
        faults=frozenset().union(*(p.faults for p in parts)),
    )


def _tokens_joined(
    a: Interpreter, parts: Sequence[TokenValue], place: int, known: Sequence[Span | None]
) -> TokenValue:
    """Return rows and tokens, one behind the other."""
    first = next(i for i, span in enumerate(known) if span is not None)
    begin, span = parts[0], known[first]
    assert span is not None
    behind = [size_of(part.known_axes[place]).number for part in parts[1:]]
    if len(begin.spans) == 2 and not any(known[1:]) and None not in behind:
        # Scores of keys that are not tokens, such as a sink: each query has its own.
        extra = sum(n for n in behind if n is not None)
        found = _joined(a, parts, place, (replace(span, extra=extra),))
        return replace(found, mask=begin.mask)
    span, tag = _run_of_tokens(a, parts[first:], place)
    for part in reversed(parts[:first]):
        span = _in_front(a, part, place, span, state=part is begin)
    state = next(iter(begin.states), "") if first and begin.time == Time.BEFORE else ""
    timeless = [replace(p, time=Time.ALWAYS) if p is begin and state else p for p in parts]
    found = _joined(a, timeless, place, (span,))
    if state:
        return replace(found, tag=_behind_state(a, state, begin, parts[first], span, place))
    return found if first else replace(found, tag=tag and tag.resized(place, span.size))


def _run_of_tokens(
    a: Interpreter, parts: Sequence[TokenValue], place: int
) -> tuple[Span, Tag | None]:
    """Return the tokens of parts, the first of which has some, and what they are of.

    Raises:
        MixingError: they do not follow one another.
    """
    span, tag = span_of(parts[0].known_axes[place]), parts[0].tag
    assert span is not None
    for part in parts[1:]:
        axis = part.known_axes[place]
        other = span_of(axis)
        if other is None:
            stop = span.stop + size_of(axis) * of(span.step)
            span, tag = replace(span, stop=stop, moved_by=a.number), None
            continue
        follows = (other.start, other.step) == (span.stop, span.step)
        if not follows or tag is None or part.tag != tag:
            raise MixingError(
                "reorders tokens, or puts other values in front of a part of them", HISTORY
            )
        span = replace(span, stop=other.stop)
    return span, tag


def _behind_state(
    a: Interpreter, state: str, begin: TokenValue, tokens: TokenValue, span: Span, place: int
) -> Tag:
    """Return what rows of a state and tokens behind them are of, and note it for the state.

    Args:
        a: the interpreter.
        state: its input.
        begin: its rows.
        tokens: the first behind them.
        span: all of them.
        place: their axis.

    Raises:
        MixingError: its rows are in front of other tokens elsewhere.
    """
    own = span_of(tokens.known_axes[place])
    assert begin.tag is not None and own is not None
    source = ("rows of", state, tokens.tag)
    tag = replace(begin.tag, source=source).resized(place, span.size)
    join = a.joins.get(state)
    if tag is None or (join is not None and join.tag != tag):
        raise MixingError("puts rows of a state in front of other tokens than they are of")
    a.joins[state] = Join(a.number, tag, own.stop, own.start - span.start)
    a.note(FlowKind.STATEFUL)
    return tag


def _in_front(a: Interpreter, part: TokenValue, place: int, span: Span, state: bool) -> Span:
    """Return tokens with rows in front of them: those of a state, or filled in."""
    size = size_of(part.known_axes[place])
    start = span.start - size * of(span.step)
    if part.time == Time.BEFORE:
        named = part.tag is not None and part.states == {part.tag.source}
        if not (state and named and len(part.states) == 1) or span.real is not None:
            raise MixingError("puts rows in front of tokens that are not a state by themselves")
        whole = span.start == a.past if size == a.past else span.stop - span.start == a.piece
        if not whole:
            raise MixingError("puts rows of a state in front of a part of the tokens of a call")
        rows = None if size == a.past else size.number
        return replace(span, start=start, rows=rows, moved_by=a.number)
    if part.time == Time.AFTER or part.tokens:
        raise MixingError("puts rows of other tokens in front of those of a call", HISTORY)
    return filled(a, span, start)


def filled(a: Interpreter, span: Span, start: Length) -> Span:
    """Return tokens with rows in front of them that are no tokens."""
    real, by = (span.start, a.number) if span.real is None else (span.real, span.filled_by)
    # What comes before the very first token is the same however a sequence is cut.
    if real.number is not None:
        return replace(span, start=start, real=None, filled_by=None, moved_by=a.number)
    return replace(span, start=start, real=real, filled_by=by, moved_by=a.number)


@rule("Pad")
def pad(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow rows that are put around, or cut off."""
    given = a.value(node.inputs[0])
    sizes = a.lengths(node, 1)
    if sizes is None:
        sizes = [of(n) for n in node.attrs["pads"]]
    axes = a.integers(node, 3) or list(range(given.rank))
    mode = node.attrs.get("mode", "constant")
    found = list(given.known_axes)
    for n, place in enumerate(axes):
        front, behind = sizes[n], sizes[n + len(axes)]
        if front == ZERO and behind == ZERO:
            continue
        axis = found[place]
        span = span_of(axis)
        if has_tokens(axis) and (span is None or mode != "constant"):
            raise MixingError(f"pads the tokens of a call with copies of them ({mode})")
        if span is None:
            if any(f.step for f in axis):
                raise MixingError("puts numbers around the tokens of a chunk")
            found[place] = fixed(size_of(axis) + front + behind)
            continue
        each = of(span.step)
        start, stop = span.start - front * each, span.stop + behind * each
        cut_off = (-front).is_at_least_zero
        made = (
            span.cut(start, stop, a.number)
            if cut_off
            else replace(filled(a, span, start), stop=stop)
        )
        found[place] = (made,)
    a.check_same_everywhere(given)
    tag = given.tag if list(given.known_axes) == found else None
    return [replace(given, axes=tuple(found), numbers=None, form=None, mask=Mask(), tag=tag)]
