"""What each node of a graph does along the tokens, and so whether the graph streams.

A graph streams if no node mixes tokens on the way from its inputs to its outputs but by states,
rows of earlier tokens among them, and each state that it gives is the one that it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.states import LENGTH, State
from linexport.token_flow import rules
from linexport.token_flow.axes import size_of, span_of
from linexport.token_flow.interpreter import Followed, Interpreter, Kind
from linexport.token_flow.lengths import of
from linexport.token_flow.values import Tag, Time, Value

assert rules


@dataclass(frozen=True)
class Placed:
    """A node that reaches back, or mixes tokens.

    Attributes:
        node: its name.
        op: its operator; of one in the body of another, with that one's.
        kind: what it does.
        reach: how many tokens behind its own it looks; None where that is not known.
        rows: rows of past tokens that there are for it; None for all.
        reason, advice: why it mixes tokens, and what would make it stream.
    """

    node: str
    op: str
    kind: Kind
    reach: int | None = None
    rows: int | None = None
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Classification:
    """The nodes between the tokens of a graph and its outputs.

    Attributes:
        counts: how many there are of each kind.
        placed: those that reach back by a number of tokens, or mix tokens.
    """

    counts: dict[Kind, int]
    placed: tuple[Placed, ...]

    @property
    def mixing(self) -> tuple[Placed, ...]:
        """The nodes that mix tokens."""
        return tuple(one for one in self.placed if one.kind == Kind.MIXING)

    @property
    def reaches(self) -> tuple[int, ...]:
        """How far nodes look back, each number once."""
        return tuple(sorted({one.reach for one in self.placed if one.reach}))


NOTHING = Classification({}, ())


def classify(
    model: onnx.ModelProto, states: Collection[State], multiple: int = 1
) -> Classification:
    """Return what each node does that is on a way from tokens to an output.

    Args:
        model: after the passes that give states, before it is lowered.
        states: of it; without any, nothing is carried and all is one sequence.
        multiple: what the number of tokens is a multiple of.
    """
    graph = gs.import_onnx(model)
    tokens = sequence_axis.symbol(graph)
    if tokens is None or not states:
        return NOTHING
    a = Interpreter(graph, tokens, states, multiple)
    a.run()
    turned = {number for number, value in a.turns.items() if value in a.turned}
    faults = {number: node for number, node in _faults(a) if number not in turned}
    return _classified(a, faults)


def _faults(a: Interpreter) -> Iterator[tuple[int, Followed]]:
    """Yield the nodes that mix tokens on the way to an output, by number."""
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
            a.followed[number].kind = Kind.MIXING
            a.followed[number].reason = a.followed[number].reason or text
            yield number, a.followed[number]


def _output_fault(a: Interpreter, value: Value) -> tuple[int | None, str] | None:
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
        if span is None:
            continue
        if span.valid_from != a.past and span.real is not None:
            return span.filled_by, "puts rows in front of the tokens of each call"
        if span.start != a.past:
            ahead = (span.start - a.past).number
            if ahead is not None and ahead > 0:
                return None, f"gives each token what is of tokens up to {ahead} ahead"
            return None, "gives an output for other tokens than those of a call"
        if span.stop != a.end:
            return None, "gives an output for fewer or more tokens than there are"
    return None


def _state_fault(a: Interpreter, state: State, value: Value) -> tuple[int | None, str] | None:
    """Return why a state is not the one that it continues."""
    if state.past in a.carried:
        return None
    if (state.past, state.present) == LENGTH:
        counted = value.uniform
        return None if counted == a.end else (None, "does not count the tokens")
    if state.past.endswith("_begun"):
        return None
    join = a.joins.get(state.past)
    if join is None:
        return None, f"gives a state {state.present} that no rows of {state.past} precede"
    span = span_of(value.axes[join.axis]) if value.axes else None
    own = span_of(join.value.known_axes[join.axis])
    tag = Tag(("rows of", state.past))
    if span is None or own is None or value.tag != tag or join.order is not None:
        return join.node, "gives other rows to the next call than it takes from the one before"
    size = size_of(value.known_axes[join.axis])
    whole = own.start == of(0) and span.start == of(0)
    kept = span.start == a.end - (a.past - own.start)
    if span.stop != a.end or not (whole or kept) or size is None:
        return join.node, "gives other rows to the next call than it takes from the one before"
    return None


def _classified(a: Interpreter, faults: dict[int, Followed]) -> Classification:
    """Count nodes by what they do, and name those that reach back or mix tokens."""
    reached = _reached(a)
    kinds: dict[int, Kind] = {}
    placed: dict[tuple[int, Kind], Placed] = {}
    order = list(Kind)
    for number, found in enumerate(a.followed):
        mixing = number in faults
        if not mixing and (number not in reached or not found.tokens):
            continue
        kind = Kind.MIXING if mixing else found.kind
        kind = Kind.TOKENWISE if kind == Kind.MIXING and not mixing else kind
        outer = id(found.outer)
        kinds[outer] = max(kinds.get(outer, Kind.TOKENWISE), kind, key=order.index)
        if mixing or found.reach:
            placed[id(found.node), kind] = _placed(found, kind)
    offsets = [f for f in a.followed if f.kind == Kind.OFFSET]
    for found in offsets:
        kinds[id(found.outer)] = Kind.OFFSET
    counts = Counter(kinds.values())
    return Classification({kind: counts[kind] for kind in Kind}, tuple(placed.values()))


def _reached(a: Interpreter) -> set[int]:
    """Return the nodes that an output reads."""
    todo = [m for t in a.graph.outputs if (m := a.maker(t.name)) is not None]
    found = set(todo)
    while todo:
        for number in a.followed[todo.pop()].reads - found:
            found.add(number)
            todo.append(number)
    return found


def _placed(found: Followed, kind: Kind) -> Placed:
    inner = found.node is not found.outer
    op = f"{found.node.op} in {found.outer.op}" if inner else found.node.op
    mixing = kind == Kind.MIXING
    return Placed(
        found.outer.name,
        op,
        kind,
        found.reach,
        found.rows if found.reach else 0,
        found.reason if mixing else "",
        found.advice if mixing else "",
    )


def named(nodes: Sequence[Placed], most: int) -> str:
    """Return nodes as text: operator, name and reason."""
    return "; ".join(f"{one.op} {one.node} {one.reason}".strip() for one in nodes[:most])
