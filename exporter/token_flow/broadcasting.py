"""Values side by side, element by element: which tokens meet, and how far one is behind another.

    x (B, T, C) with tokens P ... P+T-1      y (B, T, C) with tokens P-3 ... P+T-4

meet as x_t and y_{t-3}: the result has the later token, and reaches three tokens back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linexport.graph.operators import COPIES
from linexport.token_flow.axes import Axis, Fixed, Span, fixed, has_tokens, span_of, spans
from linexport.token_flow.interpreter import FlowKind, Interpreter
from linexport.token_flow.lengths import PAST, ZERO, Length, of
from linexport.token_flow.masks import COMPARISONS, Mask, combined, linear
from linexport.token_flow.values import SMALL, Affine, MixingError, Tag, Time, TokenValue

_TIMES = "puts values from before a call and after it together"

LINEAR = ("Add", "Sub", "Mul", "Neg", "Sum", *COPIES)


@dataclass(frozen=True)
class Aligned:
    """Values as they meet.

    Attributes:
        values: with axes of one rank, those of tokens called by the tokens they meet.
        axes: of the result.
        time: when it is taken.
    """

    values: list[TokenValue]
    axes: tuple[Axis, ...]
    time: Time


def elementwise(a: Interpreter, op: str, inputs: Sequence[TokenValue]) -> TokenValue:
    """Return what an operator that acts on each entry makes of values.

    Raises:
        MixingError: it mixes tokens.
    """
    continued = _continued(a, inputs) if op == "Add" else None
    if continued is not None:
        return continued
    numbers = of_numbers(op, inputs)
    if numbers is not None:
        axes = tuple(fixed(of(size)) for size in numbers.shape)
        return TokenValue(axes, numbers=numbers, faults=_faults(inputs))
    met = align(a, inputs)
    values, axes, time = met.values, met.axes, met.time
    if spans(axes) and any(_counts_past(v) for v in inputs):
        a.note(FlowKind.OFFSET)
    if op in COMPARISONS:
        values = _compared(values, axes)
    form = _form(op, values, axes)
    if form is None and not spans(axes):
        values, time = _at_the_end(a, values, time)
    if form is None or any(v.tokens for v in values):
        a.check_same_everywhere(*values)
    tokens = any(v.tokens for v in values)
    mask, states = _mask(op, values, axes), _states(inputs, axes)
    made = TokenValue(axes, None, form, mask, time, tokens, None, _faults(inputs), states)
    # A number that is added to a running sum does not keep a state from continuing it.
    if op in COPIES or (op in ("Add", "Sub") and inputs[1].uniform is not None):
        made = replace(made, running=inputs[0].running)
    if op not in COPIES:
        return made
    return replace(made, tag=inputs[0].tag, numbers=inputs[0].numbers)


def _at_the_end(
    a: Interpreter, values: list[TokenValue], time: Time
) -> tuple[list[TokenValue], Time]:
    """Return values and their time, which is after a call where the number of all tokens is one.

    Raises:
        MixingError: another is from before the call.
    """
    if not any(_counts_all(a, v) for v in values):
        return values, time
    if time == Time.BEFORE:
        raise MixingError(_TIMES)
    values = [replace(v, numbers=None, form=None) if _counts_all(a, v) else v for v in values]
    return values, Time.AFTER


def _states(inputs: Sequence[TokenValue], axes: Sequence[Axis]) -> frozenset[str]:
    """Return the states that a value without tokens is made of; none where something else is."""
    if spans(axes) or not all(v.states or not v.tokens for v in inputs):
        return frozenset()
    return frozenset[str]().union(*(v.states for v in inputs))


def _continued(a: Interpreter, inputs: Sequence[TokenValue]) -> TokenValue | None:
    """Return the sum of a state and of what is added up over the tokens of a call; None of others.

    If the state is the sum over the tokens before, it is the sum over all: see
    ``Interpreter.continued``.
    """
    sums = [v for v in inputs if v.running is not None]
    states = [v for v in inputs if len(v.states) == 1 and v.time == Time.BEFORE]
    if len(inputs) != 2 or len(sums) != 1 or len(states) != 1:
        return None
    (value,), (state,) = sums, states
    number, name = value.running, next(iter(state.states))
    if number is None or any(any(axis) for axis in state.known_axes[1:]):
        return None
    found = replace(
        value.without_numbers(), tokens=True, faults=(value.faults | state.faults) - {number}
    )
    if value.spans:
        a.continued.setdefault(number, set()).add(name)
        return found
    tag = Tag.of(("sum with", name, a.sums[number]), value.known_axes)
    return replace(found, time=Time.AFTER, tag=tag)


def _faults(inputs: Sequence[TokenValue]) -> frozenset[int]:
    return frozenset().union(*(v.faults for v in inputs))


def _counts_past(value: TokenValue) -> bool:
    """Return whether a value is a number of tokens that earlier calls were fed."""
    number = value.uniform
    return isinstance(number, Length) and PAST in number.symbols


def _counts_all(a: Interpreter, value: TokenValue) -> bool:
    """Return whether a value is the number of all tokens up to the end of a call, and a constant.

    However a sequence is cut, it is the same behind its last token.
    """
    number = value.uniform
    return isinstance(number, Length) and (number - a.end).number is not None


def _compared(values: list[TokenValue], axes: Sequence[Axis]) -> list[TokenValue]:
    """Return the difference of two values and zero, where both are linear in indices.

    Positions that begin anew in every call have differences that do not.
    """
    difference = _form("Sub", values, axes)
    if difference is None or len(values) != 2:
        return values
    first, second = values
    tokens = first.tokens or second.tokens
    return [
        replace(first, axes=tuple(axes), form=difference, numbers=None, tokens=tokens),
        replace(second, axes=((),) * len(axes), form=Affine(ZERO, (0,) * len(axes)), numbers=None),
    ]


def align(a: Interpreter, inputs: Sequence[TokenValue]) -> Aligned:
    """Return values as they meet when they are broadcast.

    Raises:
        MixingError: tokens meet others, or a piece of a sequence is not enough to know which.
    """
    rank = max(value.rank for value in inputs)
    values = [_with_rank(value, rank) for value in inputs]
    axes: list[Axis] = []
    for place in range(rank):
        axes.append(_meet(a, values, place))
    times = {v.time for v in values if v.uniform is None} - {Time.ALWAYS}
    if times and spans(axes):
        when = " and ".join(sorted(time.value for time in times))
        raise MixingError(
            f"combines every token with a value {when}",
            "a token may read others through a state, or up to its own by a causal mask",
        )
    if len(times) > 1:
        raise MixingError(_TIMES)
    return Aligned(values, tuple(axes), next(iter(times), Time.ALWAYS))


def _with_rank(value: TokenValue, rank: int) -> TokenValue:
    """Return a value with axes of size 1 in front."""
    missing = rank - value.rank
    if not missing:
        return value
    form = value.linear()
    if form is not None:
        form = Affine(form.number, (0,) * missing + form.by)
    numbers = value.numbers
    if numbers is not None:
        numbers = numbers.reshape((1,) * missing + numbers.shape)
    axes = ((),) * missing + value.known_axes
    return replace(value, axes=axes, form=form, numbers=numbers)


def _meet(a: Interpreter, values: list[TokenValue], place: int) -> Axis:
    """Return the axis that values have at a place, whose tokens are then called the same there."""
    there = [(i, v.known_axes[place]) for i, v in enumerate(values) if v.known_axes[place]]
    if not there:
        return ()
    different = {tuple(_place(f) for f in axis) for _, axis in there}
    if len(different) > 1:
        # One number everywhere is the same whatever its elements are called.
        for i, _ in list(there):
            if values[i].uniform is not None and len(there) > 1:
                there = [pair for pair in there if pair[0] != i]
    lengths = {len(axis) for _, axis in there}
    if len(lengths) > 1:
        raise MixingError("puts axes of tokens together that cannot be followed")
    return tuple(
        _factor(a, values, place, [(i, axis[n]) for i, axis in there], n)
        for n in range(lengths.pop())
    )


def _place(factor: Fixed | Span) -> object:
    return factor.place if isinstance(factor, Span) else factor


def _factor(
    a: Interpreter,
    values: list[TokenValue],
    place: int,
    factors: list[tuple[int, Fixed | Span]],
    number: int,
) -> Fixed | Span:
    """Return the factor that several become."""
    sizes = {factor.size for _, factor in factors}
    if len(sizes) > 1:
        raise MixingError("puts axes together whose sizes are not known to be the same")
    own = [(i, f) for i, f in factors if isinstance(f, Span)]
    others = [(i, f) for i, f in factors if isinstance(f, Fixed)]
    if not own:
        inside = [f for _, f in others if f.step]
        if inside and not inside[0].aligned and len(inside) < len(others):
            raise MixingError(
                "depends on the place of a token in its chunk, which begins anew in every call"
            )
        return inside[0] if inside else others[0][1]
    if others:
        for i, span in own:
            values[i] = untimed(a, values[i], place, span)
        return others[0][1]
    target = _target(values, own)
    for i, span in own:
        shift = target.start - span.start
        if shift.terms:
            values[i] = _shifted(a, values[i], place, number, shift)
    met = [f for i, _ in own if (f := values[i].known_axes[place][number]) and isinstance(f, Span)]
    latest = max(met, key=lambda f: _after(f.valid_from, target.start))
    every = [f.rows for f in met]
    rows = None if None in every else max(r or 0 for r in every)
    return replace(
        target, real=latest.real, filled_by=latest.filled_by, rows=rows, aligned=target.aligned
    )


def _after(token: Length, other: Length) -> float:
    """Return how far a token is behind another; a global one, in front of a piece's, is not."""
    distance = (token - other).number
    return float("-inf") if distance is None else distance


def _target(values: list[TokenValue], own: Sequence[tuple[int, Span]]) -> Span:
    """Return the latest of the tokens that meet, of values that depend on them."""
    reading = [span for i, span in own if values[i].tokens]
    target = reading[0] if reading else own[0][1]
    for span in reading[1:]:
        if (span.step, span.aligned) != (target.step, target.aligned):
            raise MixingError("puts tokens and chunks of tokens together")
        later = (span.start - target.start).number
        if later is None:
            raise MixingError(
                "puts tokens of a call together with tokens counted from the first of all",
                "their distance depends on where a sequence is cut",
            )
        target = span if later > 0 else target
    return target


def _shifted(a: Interpreter, value: TokenValue, place: int, number: int, by: Length) -> TokenValue:
    """Return a value whose tokens at a place are called by others."""
    axis = value.known_axes[place]
    span = axis[number]
    assert isinstance(span, Span)
    distance = by.number
    if value.tokens:
        if distance is None:
            raise MixingError("meets tokens at a distance that depends on where a sequence is cut")
        a.note(FlowKind.WINDOW, distance, span.rows)
    form = value.form
    if form is not None:
        # What was n times token t is n times token t' - by.
        form = Affine(form.number - by * of(form.by[place]), form.by)
    elif distance is None and value.uniform is None:
        raise MixingError("meets tokens at a distance that depends on where a sequence is cut")
    mask = value.mask
    if len(value.spans) == 2 and distance is not None:
        first = next(i for i, x in enumerate(value.known_axes) if has_tokens(x))
        mask = mask.shifted(distance if place == first else -distance)
    axes = list(value.known_axes)
    axes[place] = (*axis[:number], span.shifted(by), *axis[number + 1 :])
    return replace(value, axes=tuple(axes), form=form, mask=mask, tag=None)


def at_call(a: Interpreter, value: TokenValue, place: int) -> TokenValue:
    """Return a value whose tokens, a number behind those of the call, are called by the latter.

    A value with other tokens is returned as it is.
    """
    span = span_of(value.known_axes[place])
    if span is None or span.stop - span.start != a.piece or span.real is not None:
        return value
    behind = (a.past - span.start).number
    return _shifted(a, value, place, 0, of(behind)) if behind and behind > 0 else value


def untimed(a: Interpreter, value: TokenValue, place: int, span: Span) -> TokenValue:
    """Return a value whose few tokens at a place are no more than elements."""
    if span.real is not None:
        raise MixingError("reads rows that were filled in")
    if not value.tokens or value.uniform is not None:
        a.check_same_everywhere(value)
        time = value.time
    elif span.stop == a.past:
        time = Time.BEFORE
    elif span.stop == a.end:
        time = Time.AFTER
    else:
        raise MixingError(
            "reads tokens at the beginning of each call",
            "later tokens must not read the first ones of a call",
        )
    axes = list(value.known_axes)
    axes[place] = fixed(span.size)
    return replace(value, axes=tuple(axes), time=time, form=None, numbers=None, tag=None)


def _form(op: str, values: Sequence[TokenValue], axes: Sequence[Axis]) -> Affine | None:
    """Return the elements of a result that are linear in indices."""
    if op not in LINEAR:
        return None
    forms = [v.linear() for v in values[: 1 if op == "CastLike" else None]]
    known = [f for f in forms if f is not None]
    if len(known) < len(forms) or not known:
        return None
    if op == "Mul":
        first, second = known
        for one, other in ((first, second), (second, first)):
            if not any(one.by):
                number = one.number.number
                if number is not None:
                    return other.times(number)
                if not any(other.by):
                    return Affine(one.number * other.number, one.by)
        return None
    if op == "Neg":
        return known[0].times(-1)
    found = known[0]
    for other in known[1:]:
        found = found.plus(other, -1 if op == "Sub" else 1)
    if any(n and len(axis) > 1 for n, axis in zip(found.by, axes, strict=True)):
        return None
    return found


def _mask(op: str, values: Sequence[TokenValue], axes: Sequence[Axis]) -> Mask:
    """Return a result as a function of the distance between its two axes of tokens."""
    pairs = pair_of(axes)
    if pairs is None:
        return Mask()
    given = [mask_of(v, axes, pairs) for v in values[: 1 if op == "CastLike" else None]]
    return combined(op, given)


def pair_of(axes: Sequence[Axis]) -> tuple[int, int] | None:
    """Return the places of two axes of tokens; None where there are others, or chunks.

    Heads of queries may be in front of the tokens in one axis.
    """
    places = [i for i, axis in enumerate(axes) if has_tokens(axis)]
    if len(places) != 2:
        return None
    steps = [sorted(factor.step for factor in axes[i]) for i in places]
    whole = all(own[-1] == 1 and not any(own[:-1]) for own in steps)
    return (places[0], places[1]) if whole else None


def mask_of(value: TokenValue, axes: Sequence[Axis], pair: tuple[int, int]) -> Mask:
    """Return what is known of a value by the distance between two axes of tokens."""
    first, second = pair
    form = value.form
    if form is not None and any(form.by):
        others = [n for i, n in enumerate(form.by) if i not in pair]
        slope, number = form.by[first], form.number.number
        if form.by[second] == -slope and number is not None and not any(others):
            return linear(slope, number)
        return Mask()
    return value.as_mask()


def of_numbers(op: str, inputs: Sequence[TokenValue]) -> np.ndarray | None:
    """Return the elements of a result whose inputs are known; None where they are not computed."""
    given = [v.numbers for v in inputs[: 1 if op == "CastLike" else None]]
    if op not in ARITHMETIC or any(n is None for n in given):
        return None
    try:
        pairs = np.broadcast(*(n for n in given if n is not None))
        if pairs.size > SMALL:
            return None
        found = np.empty(pairs.shape, object)
        for place, numbers in zip(np.ndindex(*pairs.shape), pairs, strict=True):
            found[place] = ARITHMETIC[op](*numbers)
        return found
    except (TypeError, ValueError, ArithmeticError):
        return None


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numbers, for lengths that are numbers."""

    def apply(*values: Length | float) -> Length | float:
        known = [v.number if isinstance(v, Length) else v for v in values]
        if any(n is None for n in known):
            raise ValueError
        found = function(*known)
        return of(int(found)) if all(isinstance(v, Length) for v in values) else float(found)

    return apply


def _quotient(x: Length | float, y: Length | float) -> Length | float:
    # Integers that are divided are sizes: not below zero.
    return x // y if isinstance(x, Length) and isinstance(y, Length) else _true(x, y)


_true = _exactly(operator.truediv)

ARITHMETIC: dict[str, Callable[..., object]] = {
    **dict.fromkeys(COPIES, lambda x: x),
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Div": _quotient,
    "Mod": operator.mod,
    "Max": _exactly(max),
    "Min": _exactly(min),
    "Abs": _exactly(abs),
    "Ceil": _exactly(math.ceil),
    "Floor": _exactly(math.floor),
    "Sqrt": _exactly(math.sqrt),
    "Reciprocal": _exactly(lambda x: 1 / x),
    "Exp": _exactly(math.exp),
    "Where": lambda c, x, y: x if _exactly(bool)(c) else y,
    **{name: _exactly(function) for name, function in COMPARISONS.items()},
    "Not": _exactly(lambda x: not x),
    "And": _exactly(lambda x, y: bool(x) and bool(y)),
    "Or": _exactly(lambda x, y: bool(x) or bool(y)),
}
"""Operators that act on each entry, of known numbers."""
