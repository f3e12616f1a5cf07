"""Operators with bodies: loops over tokens or over anything else, and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, Span, fixed, has_tokens, span_of
from linexport.token_flow.broadcasting import at_call
from linexport.token_flow.interpreter import FlowKind, Interpreter, rule
from linexport.token_flow.rules.pieces import FILLED, HISTORY
from linexport.token_flow.values import MixingError, Time, TokenValue

ROUNDS = 4
"""Times a body is followed until what it carries is the same as before."""

STATE = (
    "a loop over tokens streams where its states are (batch, ...) of fixed sizes and begin with "
    "zeros or weights"
)


@rule("Scan")
def scan(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a loop over an axis of tensors."""
    count = node.attrs["num_scan_inputs"]
    values = [a.value(t) for t in node.inputs]
    states, given = values[: len(values) - count], values[len(values) - count :]
    axes = [x % max(v.rank, 1) for x, v in zip(_places(node, "input", count), given, strict=True)]
    given = [at_call(a, v, x) for v, x in zip(given, axes, strict=True)]
    along = [v.known_axes[x] for v, x in zip(given, axes, strict=True)]
    outs = _places(node, "output", len(node.outputs) - len(states))
    inner = [
        replace(v.without_numbers(), axes=_without(v, x)) for v, x in zip(given, axes, strict=True)
    ]
    a.check_same_everywhere(*given)
    if any(map(has_tokens, along)):
        span = _one_span(along)
        if any(any(node.attrs.get(f"scan_{s}_directions") or ()) for s in ("input", "output")):
            raise MixingError("runs backwards over tokens", "a causal model reads them forwards")
        return _over_tokens(a, node, states, inner, span, outs)
    return _over_others(a, node, states, inner, along[0] if along else (), outs)


def _places(node: gs.Node, side: str, count: int) -> list[int]:
    return list(node.attrs.get(f"scan_{side}_axes") or [0] * count)


def _without(value: TokenValue, place: int) -> tuple[Axis, ...]:
    return (*value.known_axes[:place], *value.known_axes[place + 1 :])


def _one_span(along: Sequence[Axis]) -> Span:
    spans = [span_of(axis) for axis in along]
    first = spans[0]
    if first is None or any(s is None or s.place != first.place for s in spans):
        raise MixingError("runs over tokens and something else")
    if first.real is not None:
        raise MixingError(FILLED, HISTORY, at=first.filled_by)
    return first


def _over_tokens(
    a: Interpreter,
    node: gs.Node,
    states: Sequence[TokenValue],
    inner: Sequence[TokenValue],
    span: Span,
    outs: Sequence[int],
) -> Sequence[TokenValue]:
    """Follow a loop over tokens, whose states must be those of the model."""
    body = node.attrs["body"]
    if span.start != a.past or span.stop != a.end:
        raise MixingError("gives a loop other tokens than those of a call", at=span.moved_by)
    if any(v.spans for v in inner):
        raise MixingError("runs over tokens of which each has others")
    around = a.captured(body)
    if any(v.spans or v.time != Time.ALWAYS for v in around):
        raise MixingError("reads tokens besides the one of each step")
    a.check_same_everywhere(*around)
    lost = [i for i in range(len(states)) if not _is_carried(a, node, i)]
    if lost:
        raise MixingError("carries a state that is not an input and an output of the model", STATE)
    names = [t.name for t in body.inputs]
    begin = [_inside(a, t) for t in body.inputs[: len(states)]]
    given = [replace(v, tokens=True, time=Time.ALWAYS) for v in inner]
    found = a.follow_body(body, dict(zip(names, [*begin, *given], strict=True)))
    if states:
        a.note(FlowKind.STATEFUL)
    faults = frozenset().union(*(v.faults for v in (*inner, *found)))
    last = [
        replace(v.without_numbers(), time=Time.AFTER, tokens=True, faults=faults)
        for v in found[: len(states)]
    ]
    every = []
    for value, place in zip(found[len(states) :], outs, strict=True):
        place %= value.rank + 1
        axes = (*value.known_axes[:place], (span,), *value.known_axes[place:])
        made = replace(value.without_numbers(), axes=axes, tokens=True, faults=faults)
        every.append(made)
    return [*last, *every]


def _inside(a: Interpreter, tensor: gs.Tensor) -> TokenValue:
    """Return a state as the body of a loop over tokens has it."""
    shape = tensor.shape
    if shape is None or any(size in (None, "") for size in shape):
        return TokenValue(None, tokens=True)
    return TokenValue(tuple(fixed(a.size(size)) for size in shape), tokens=True)


def _is_carried(a: Interpreter, node: gs.Node, place: int) -> bool:
    """Return whether a state of a loop begins with one of the model, and gives it out."""
    value = a.value(node.inputs[place])
    if len(value.states) != 1 or value.tag is None or value.states != {value.tag.source}:
        return False
    (name,) = value.states
    outputs = {t.name for t in (node.outputs[place], *_copies(node.outputs[place]))}
    if a.states[name].present not in outputs:
        return False
    a.carried.add(name)
    return True


def _copies(tensor: gs.Tensor) -> list[gs.Tensor]:
    return [o for n in tensor.outputs if n.op == "Identity" for o in n.outputs]


def _over_others(
    a: Interpreter,
    node: gs.Node,
    states: Sequence[TokenValue],
    inner: Sequence[TokenValue],
    along: Axis,
    outs: Sequence[int],
) -> Sequence[TokenValue]:
    """Follow a loop over an axis without tokens, until its carried values reach a fixed point."""
    body = node.attrs["body"]
    a.check_aligned(along)
    found = _settled(a, body, (), states, inner)
    every = []
    for value, place in zip(found[len(states) :], outs, strict=True):
        place %= value.rank + 1
        axes = (*value.known_axes[:place], along, *value.known_axes[place:])
        every.append(replace(value.without_numbers(), axes=axes))
    return [*found[: len(states)], *every]


def _settled(
    a: Interpreter,
    body: gs.Graph,
    before: Sequence[TokenValue],
    carried: Sequence[TokenValue],
    behind: Sequence[TokenValue] = (),
    skipped: int = 0,
) -> list[TokenValue]:
    """Return what a body gives once what it carries is what it was given.

    Args:
        a: follows it.
        body: of a loop.
        before: its inputs in front of what is carried.
        carried: what the loop begins with.
        behind: its inputs behind that.
        skipped: its outputs in front of what is carried.
    """
    a.check_same_everywhere(*carried)
    names = [t.name for t in body.inputs]
    own = [replace(v.without_numbers(), states=frozenset()) for v in carried]
    for _ in range(ROUNDS):
        inputs = dict(zip(names, [*before, *own, *behind], strict=True))
        found = a.follow_body(body, inputs)
        given = found[skipped : skipped + len(own)]
        after = [_either(v, w) for v, w in zip(own, given, strict=True)]
        if after == own:
            return found
        own = after
    raise MixingError("carries values that are of other tokens in every step")


def _either(first: TokenValue, second: TokenValue) -> TokenValue:
    """Return what is known of a value that is one of two.

    Raises:
        MixingError: they have other axes.
    """
    axes, other = first.known_axes, second.known_axes
    times = {first.time, second.time} - {Time.ALWAYS}
    if axes != other or len(times) > 1:
        raise MixingError("gives one of two values of other tokens")
    return TokenValue(
        axes,
        time=next(iter(times), Time.ALWAYS),
        tokens=first.tokens or second.tokens,
        faults=first.faults | second.faults,
    )


@rule("Loop")
def loop(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a loop that runs as often in every call."""
    body = node.attrs["body"]
    ends = [a.value(t) for t in node.inputs[:2] if not t.is_empty()]
    a.check_same_everywhere(*ends)
    if any(v.tokens or v.faults or v.time != Time.ALWAYS for v in ends):
        raise MixingError("runs a number of times that depends on the tokens")
    step = [TokenValue(()), TokenValue(())]
    carried = [a.value(t) for t in node.inputs[2:]]
    count = len(carried)
    found = _settled(a, body, step, carried, skipped=1)
    if found[0].tokens or found[0].faults:
        raise MixingError("runs until a condition on the tokens holds")
    every = [a.stated(t) for t in node.outputs[count:]]
    known = []
    for stated, value in zip(every, found[count + 1 :], strict=True):
        first = stated.axes[:1] if stated.axes else ((),)
        axes = (*first, *value.known_axes)
        known.append(replace(value.without_numbers(), axes=axes))
    return [*found[1 : count + 1], *known]


@rule("If")
def choice(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow one of two bodies."""
    condition = a.value(node.inputs[0])
    a.check_same_everywhere(condition)
    if condition.tokens or condition.faults or condition.time != Time.ALWAYS:
        raise MixingError("chooses by values of tokens, or by their number")
    bodies = [node.attrs["then_branch"], node.attrs["else_branch"]]
    first, second = (a.follow_body(body, {}) for body in bodies)
    return [_either(v, w) for v, w in zip(first, second, strict=True)]
