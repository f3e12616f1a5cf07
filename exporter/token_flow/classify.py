"""Classification of the nodes of a graph by what they do along the tokens.

A graph streams if no node mixes tokens on the way from its inputs to its outputs but by states,
rows of earlier tokens among them, and each state that it gives is the one that it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.states import BEGUN, LENGTH, State
from linexport.manifest.records import FIRST_CALL
from linexport.token_flow import rules
from linexport.token_flow.axes import has_tokens, size_of, span_of
from linexport.token_flow.constants import along_tokens
from linexport.token_flow.interpreter import FlowKind, Followed, Interpreter
from linexport.token_flow.lengths import ZERO
from linexport.token_flow.rules.pieces import FILLED
from linexport.token_flow.values import Tag, Time, TokenValue

assert rules


@dataclass(frozen=True)
class FlowNode:
    """A node that reaches back, or mixes tokens.

    Attributes:
        node: its name.
        op: its operator; of one in the body of another, with that one's.
        kind: what it does.
        reach: how many tokens behind its own it looks; None where that is not known.
        rows: rows of past tokens that there are for it; None for all.
        reason, advice: why it mixes tokens, and what would make it stream.
        near: names of the node, of what it gives, and of the nodes before it, the nearest first.
    """

    node: str
    op: str
    kind: FlowKind
    reach: int | None = None
    rows: int | None = None
    reason: str = ""
    advice: str = ""
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class Classification:
    """The nodes between the tokens of a graph and its outputs.

    Attributes:
        counts: how many there are of each kind.
        placed: those that reach back by a number of tokens, or mix tokens.
        constants: numbers that the graph uses along its tokens, see ``constants``.
    """

    counts: dict[FlowKind, int]
    placed: tuple[FlowNode, ...]
    constants: tuple[int, ...] = ()

    @property
    def mixing(self) -> tuple[FlowNode, ...]:
        """The nodes that mix tokens."""
        return tuple(one for one in self.placed if one.kind == FlowKind.MIXING)

    @property
    def reaches(self) -> tuple[int, ...]:
        """How far nodes look back, or may do so, each number once."""
        return tuple(sorted({*self.constants, *(one.reach for one in self.placed if one.reach)}))


NEAR = 12
"""Nodes before another that are searched for a line of the model's author."""

NOTHING = Classification({}, ())


def classify(
    model: onnx.ModelProto,
    states: Collection[State],
    tokens: str | None = None,
    multiple: int = 1,
) -> Classification:
    """Return what each node does that is on a way from tokens to an output.

    Args:
        model: after the passes that give states, before it is lowered.
        states: of it; without any, nothing is carried and all is one sequence.
        tokens: the size of the axis of tokens, where no node with a state tells it.
        multiple: what the number of tokens is a multiple of.
    """
    if not states:
        return NOTHING
    graph = gs.import_onnx(model)
    tokens = sequence_axis.symbol(graph) or tokens
    if tokens is None or not any(tokens in (t.shape or ()) for t in graph.inputs):
        unknown = FlowNode("", "", FlowKind.MIXING, reason="no input is known to have the tokens")
        return Classification({FlowKind.MIXING: 1}, (unknown,))
    a = Interpreter(graph, tokens, states, multiple)
    a.run()
    turned = {number for number, value in a.sums.items() if value in a.turned}
    faults = {number: node for number, node in _faults(a) if number not in turned}
    return replace(_classified(a, faults), constants=along_tokens(graph, tokens))


def _faults(a: Interpreter) -> Iterator[tuple[int, Followed]]:
    """Yield the nodes that mix tokens on the way to an output, by number."""
    outputs = {tensor.name: a.value(tensor) for tensor in a.graph.outputs}
    for number, names in a.continued.items():
        if not all(_sums(outputs[a.states[name].present], name, a.sums[number]) for name in names):
            yield number, a.followed[number]
    presents = {state.present: state for state in a.states.values()}
    for tensor in a.graph.outputs:
        value = a.value(tensor)
        for number in value.faults:
            yield number, a.followed[number]
        state = presents.get(tensor.name)
        reason = _state_fault(a, state, value) if state else _output_fault(a, value)
        made = a.maker(tensor.name)
        if reason and made is not None and not value.faults:
            place, text = reason
            number = made if place is None else place
            a.followed[number].kind = FlowKind.MIXING
            a.followed[number].reason = a.followed[number].reason or text
            yield number, a.followed[number]


def _sums(value: TokenValue, past: str, source: str) -> bool:
    """Return whether a state is the past and the sum of a value over the tokens of a call."""
    return value.tag is not None and value.tag.source == ("sum with", past, source)


def _output_fault(a: Interpreter, value: TokenValue) -> tuple[int | None, str] | None:
    """Return why an output is not what it is in the whole sequence, and which node is to blame."""
    if not value.tokens:
        return (None, "depends on the length of a call") if a.depends_on_piece(value) else None
    if value.axes is None:
        return None, "gives an output whose shape is not known"
    if value.time == Time.BEFORE:
        return None, "gives what is known before a call"
    if a.depends_on_piece(value):
        return None, "depends on the number of tokens of a call"
    found = [axis for axis in value.axes if span_of(axis) or any(f.step for f in axis)]
    if len(value.spans) > 1:
        return None, "gives an output for each pair of tokens"
    for axis in found:
        span = span_of(axis)
        if span is None and len(axis) > 1:
            return None, "gives sequences and their tokens in one axis"
        if span is None:
            continue
        if span.valid_from != a.past and span.real is not None:
            return span.filled_by, FILLED
        if span.size.number is not None and span.stop == a.end:
            continue  # the last rows, as one call gives them
        ahead = (span.start - a.past).number
        if ahead is not None and ahead > 0:
            return None, f"lets tokens read up to {ahead} later ones"
        if ahead is None or span.stop - span.start != a.piece:
            return None, "gives an output for fewer or more tokens than there are"
    return None


def _state_fault(a: Interpreter, state: State, value: TokenValue) -> tuple[int | None, str] | None:
    """Return why a state is not the one that it continues."""
    if state.past in a.carried:
        return None
    if (state.past, state.present) == LENGTH:
        counted = value.uniform
        return None if counted == a.end else (None, "does not count the tokens")
    if state.past.endswith(BEGUN):
        return None
    if state.op == FIRST_CALL:
        same = not value.tokens and value.time == Time.ALWAYS and not a.depends_on_piece(value)
        return None if same else (None, "is not what the first call was given")
    if any(_sums(value, state.past, source) for source in a.sums.values()):
        return None
    return _rows_fault(a, state, value)


def _rows_fault(a: Interpreter, state: State, value: TokenValue) -> tuple[int | None, str] | None:
    """Return why rows of earlier tokens are not those that the next call puts in front."""
    join = a.joins.get(state.past)
    if join is None:
        return None, f"gives a state {state.present} that no rows of {state.past} precede"
    axes = value.axes or ()
    natural = list(Tag.natural(tuple(size_of(axis) for axis in axes)))
    for place, axis in enumerate(axes):
        if has_tokens(axis) and not natural[place]:  # one row, which is an axis of the state
            natural[place] = next((g for g in join.tag.groups if g[:1] >= (len(axes),)), ())
    held = value.tag == replace(join.tag, groups=tuple(natural))
    span = next(iter(value.spans), None)
    # Either as many last rows as were taken, or, of a state that grows, all tokens so far.
    whole = span is not None and span.stop == join.stop and span.size == join.rows
    every = span is not None and join.rows == a.past and span.start == ZERO and span.stop == a.end
    if not held or len(value.spans) != 1 or not (whole or every):
        return join.node, "gives other rows to the next call than it takes from the one before"
    return None


def _classified(a: Interpreter, faults: dict[int, Followed]) -> Classification:
    """Count nodes by what they do, and name those that reach back or mix tokens."""
    reached = _reached(a)
    kinds: dict[int, FlowKind] = {}
    placed: dict[tuple[int, FlowKind], FlowNode] = {}
    order = list(FlowKind)
    for number, found in enumerate(a.followed):
        mixing = number in faults
        if not mixing and (number not in reached or not found.tokens):
            continue
        kind = FlowKind.MIXING if mixing else found.kind
        kind = FlowKind.TOKENWISE if kind == FlowKind.MIXING and not mixing else kind
        outer = id(found.outer)
        kinds[outer] = max(kinds.get(outer, FlowKind.TOKENWISE), kind, key=order.index)
        if mixing or found.reach:
            placed[id(found.node), kind] = _placed(found, kind, _near(a, number))
    offsets = [f for f in a.followed if f.kind == FlowKind.OFFSET]
    for found in offsets:
        kinds[id(found.outer)] = FlowKind.OFFSET
    counts = Counter(kinds.values())
    return Classification({kind: counts[kind] for kind in FlowKind}, tuple(placed.values()))


def _reached(a: Interpreter) -> set[int]:
    """Return the nodes that an output reads."""
    todo = [m for t in a.graph.outputs if (m := a.maker(t.name)) is not None]
    found = set(todo)
    while todo:
        for number in a.followed[todo.pop()].reads - found:
            found.add(number)
            todo.append(number)
    return found


def _near(a: Interpreter, number: int) -> tuple[str, ...]:
    """Return names of a node, of what it gives, and of the nodes before it."""
    found, todo = dict[int, None](), [number]
    while todo and len(found) < NEAR:
        todo = [n for n in todo if n not in found]
        found |= dict.fromkeys(todo)
        todo = [before for n in todo for before in sorted(a.followed[n].reads)]
    nodes = [a.followed[n] for n in found]
    return tuple(
        name for f in nodes for name in (f.node.name, *(o.name for o in f.node.outputs)) if name
    )


def _placed(found: Followed, kind: FlowKind, near: tuple[str, ...]) -> FlowNode:
    inner = found.node is not found.outer
    op = f"{found.node.op} in {found.outer.op}" if inner else found.node.op
    mixing = kind == FlowKind.MIXING
    return FlowNode(
        found.outer.name,
        op,
        kind,
        found.reach,
        found.rows if found.reach else 0,
        found.reason if mixing else "",
        found.advice if mixing else "",
        near,
    )
