"""linexport ops, which declare where they have tokens, and whether states alone mix them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from linexport.errors import OpError
from linexport.graph.edit import producer
from linexport.plugins.ops import causal_conv, causal_conv_tokens
from linexport.plugins.ops.op import DOMAIN, Node, Op, StatePort
from linexport.plugins.ops.registry import all_ops
from linexport.token_flow.axes import Axis, Fixed, Span, fixed, has_tokens, size_of, span_of, spans
from linexport.token_flow.broadcasting import at_call
from linexport.token_flow.interpreter import RULES, FlowKind, Interpreter
from linexport.token_flow.lengths import Length, of
from linexport.token_flow.rules.pieces import FILLED, HISTORY
from linexport.token_flow.values import MixingError, Time, TokenValue

CONVOLUTIONS = {causal_conv.OP.name, causal_conv_tokens.OP.name}

TURNS = ("Cast", "MatMul", "Mul", "ReduceSum", "Reshape")
"""Operators between a state and its node, see ``graph.states.find_states``."""


def follow_op(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a node of a linexport op."""
    op = all_ops().get(node.op)
    if op is None:
        raise MixingError(f"is {node.domain}:{node.op}, an operator that is not followed")
    given = {
        name: a.value(t)
        for name, t in zip(op.input_names, node.inputs, strict=False)
        if not t.is_empty()
    }
    view = _view(node, op, given)
    try:
        ports, shapes = list(op.states(view)), list(op.shapes(view))
    except (OpError, LookupError, TypeError, AssertionError) as error:
        raise MixingError(f"cannot be followed: {error}") from error
    pasts = {op.input_names[port.past] for port in ports}
    read = {name: value for name, value in given.items() if name not in pasts}
    for name in op.token_axis.keys() & read.keys():
        read[name] = at_call(a, read[name], op.token_axis[name])
    span = _tokens(a, node, op, read)
    a.check_same_everywhere(*read.values())
    if any(v.time != Time.ALWAYS for v in read.values()):
        raise MixingError("combines every token with a value from before the call, or from its end")
    carries = span is not None and op.has_state and bool(ports)
    if carries:
        _check_states(a, node, ports)
        a.note(FlowKind.STATEFUL)
        if node.op in CONVOLUTIONS:
            width = size_of(given["weight"].known_axes[-1]).number or 1
            a.note(FlowKind.STATEFUL, width - 1, width - 1)
    tokens = any(v.tokens for v in read.values())
    faults = frozenset().union(*(v.faults for v in read.values()))
    first = read[op.input_names[0]].known_axes
    presents = {port.present for port in ports}
    places, found = op.tokens(node.attrs), []
    for place, name in enumerate(op.output_names[: len(node.outputs)]):
        own = places.get(name)
        axes = tuple(_axes(a, first, places[op.input_names[0]], shapes[place], own))
        time = Time.AFTER if carries and place in presents else Time.ALWAYS
        found.append(TokenValue(axes, time=time, tokens=tokens, faults=faults))
    return found


def _view(node: gs.Node, op: Op, given: Mapping[str, TokenValue]) -> Node:
    """Return a node as its op reads it."""
    shapes = {
        name: tuple(_stated(size_of(axis)) for axis in value.known_axes)
        for name, value in given.items()
    }
    present = tuple(name if name in given else "" for name in op.input_names)
    return Node(node.op, node.attrs, present, shapes)


def _stated(size: Length) -> int | str:
    return str(size) if size.number is None else size.number


def _tokens(a: Interpreter, node: gs.Node, op: Op, read: Mapping[str, TokenValue]) -> Span | None:
    """Return the tokens that a node works along; None where it has none there.

    Raises:
        MixingError: they are elsewhere, or it sees all of them.
    """
    own = _worked_along(node, op, read)
    if not any(map(has_tokens, own)):
        return None
    places = op.tokens(node.attrs)
    if any(spans(v.known_axes[:1]) for n, v in read.items() if places.get(n)):
        raise MixingError("has tokens in its batch as well")
    if not op.causal(node.attrs):
        raise MixingError(
            "lets every token see all others (causal = 0)",
            "a mask that hides later tokens (tril, s <= t) makes it causal",
        )
    if not op.has_state:
        return next(s for axis in own for s in spans([axis]))
    first, *others = (_steps(axis) for axis in own)
    same = first is not None and all(s is not None and s.place == first.place for s in others)
    if first is None or not same or any(axis[1:] != own[0][1:] for axis in own):
        raise MixingError("has other tokens in one input than in another")
    _check_call(a, first)
    return first


def _worked_along(node: gs.Node, op: Op, read: Mapping[str, TokenValue]) -> list[Axis]:
    """Return the axes of what a node reads that its op works along.

    Raises:
        MixingError: there are tokens at another axis.
    """
    places, own = op.tokens(node.attrs), list[Axis]()
    for name, value in read.items():
        place = places.get(name)
        for number, axis in enumerate(value.known_axes):
            if number == place:
                own.append(axis)
            elif has_tokens(axis) and (number or place is None):
                raise MixingError(f"has tokens at another axis of its {name} than it works along")
    return own


def _check_call(a: Interpreter, span: Span) -> None:
    """Check that tokens are those of a call: a state goes on where the call before has ended.

    Raises:
        MixingError: they are others, or filled in.
    """
    if span.real is not None:
        raise MixingError(FILLED, HISTORY, at=span.filled_by)
    if span.start == a.past and span.stop == a.end:
        return
    ahead = (span.start - a.past).number or 0
    what = (
        f"lets tokens read up to {ahead} later ones"
        if ahead > 0
        else "gives other tokens than those of the call"
    )
    raise MixingError(what, at=span.moved_by)


def _steps(axis: Axis) -> Span | None:
    """Return the tokens of an axis that has one step for each, or several in a row; else None.

    A recurrence that takes n steps for each token ends a call where the next one begins.
    """
    rest = [f for f in axis[1:] if not isinstance(f, Fixed) or f.step]
    return None if rest else span_of(axis[:1])


def _check_states(a: Interpreter, node: gs.Node, ports: Sequence[StatePort]) -> None:
    """Check that the states of a node are those of the model.

    Raises:
        MixingError: one is not.
    """
    a.turned |= _turns(a, node, ports)
    for port in ports:
        past = node.inputs[port.past] if len(node.inputs) > port.past else gs.Variable.empty()
        outputs = node.outputs[port.present : port.present + 1]
        names = {s for t in _sources(a, past) if (s := t.name) in a.states}
        presents = {t.name for o in outputs for t in _results(o)}
        if not any(a.states[name].present in presents for name in names):
            raise MixingError(
                f"has a state {port.name} that is not an input and an output of the model",
                "leave the state to begin a sequence out, or let it be zeros",
            )
        a.carried |= {name for name in names if a.states[name].present in presents}


def _turns(a: Interpreter, node: gs.Node, ports: Sequence[StatePort]) -> set[str]:
    """Return the values whose sums over a call turn a past, see ``Interpreter.turned``."""
    pasts = [node.inputs[p.past] for p in ports if len(node.inputs) > p.past]
    faults = {n for past in pasts for t in _sources(a, past) for n in a.value(t).faults}
    return {a.sums[n] for n in faults if n in a.sums}


def _sources(a: Interpreter, tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """Yield what a past is made of by casts, signs and turns, in all calls but the first."""
    yield tensor
    node = producer(tensor)
    if node is not None and node.op in TURNS:
        for given in node.inputs:
            yield from _sources(a, given)
    # The rule of Where has seen to it that its choice is that of the first call.
    if node is not None and node.op == "Where" and a.value(tensor) == a.value(node.inputs[1]):
        yield from _sources(a, node.inputs[1])


def _results(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """Yield a present, and the same in another type."""
    yield tensor
    yield from (o for n in tensor.outputs if n.op in ("Cast", "Identity") for o in n.outputs)


def _axes(
    a: Interpreter,
    first: Sequence[Axis],
    along: int,
    shape: Sequence[int | str | None],
    own: int | None,
) -> Iterator[Axis]:
    """Yield the axes of an output: the batch and the tokens are those of the first input."""
    for place, size in enumerate(shape):
        if place == own:
            yield first[along]
        elif place == 0 and along:
            yield first[0]
        else:
            if size is None:
                raise MixingError("gives an axis whose size is not known")
            yield a.axis_of(a.size(size)) if isinstance(size, str) else fixed(of(size))


RULES.update({f"{DOMAIN}:{name}": follow_op for name in all_ops()})
