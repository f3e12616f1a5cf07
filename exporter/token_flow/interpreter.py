"""A graph node after node: what each tensor is a function of, and which nodes mix tokens.

A value is followed only as far as it holds for every way of cutting a sequence: its element for a
token is what it is in the whole sequence. A node that gives another one mixes tokens; so does one
that cannot be followed. What reads it is followed on, as if it did not, to find the others.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues

from linexport.graph.states import State
from linexport.manifest.records import FIRST_CALL
from linexport.token_flow.axes import Axis, Fixed, Span, fixed, spans
from linexport.token_flow.lengths import PAST, Length, of, parse, symbol
from linexport.token_flow.values import SMALL, MixingError, Tag, Time, TokenValue, array

log = logging.getLogger(__name__)

UNEXPECTED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of rules at nodes whose inputs or attributes are not those of the operator."""

Rule = Callable[["Interpreter", gs.Node], "Sequence[TokenValue]"]
"""Gives the values of a node's outputs, in order; raises ``MixingError``."""

RULES: dict[str, Rule] = {}
"""By operator, those of other domains than ONNX's with the domain in front: "linexport:"."""

STANDARD = (None, "", "ai.onnx")


class FlowKind(enum.Enum):
    """Kind of work that a node does along the tokens."""

    TOKENWISE = "tokenwise"
    STATEFUL = "stateful"
    OFFSET = "offset"
    WINDOW = "window"
    MIXING = "mixing"


@dataclass
class Followed:
    """A node as it was followed.

    Attributes:
        node: the node, in the graph or in a body.
        outer: the node of the graph that has it in its body, or itself.
        kind: what it does.
        reach: how many tokens behind its own it looks.
        rows: rows of past tokens that its states have; None for all.
        reason, advice: why it mixes tokens, and what would make it stream.
        tokens: whether what it gives depends on the values of tokens.
        reads: numbers of the nodes that it reads.
    """

    node: gs.Node
    outer: gs.Node
    kind: FlowKind = FlowKind.TOKENWISE
    reach: int | None = None
    rows: int | None = None
    reason: str = ""
    advice: str = ""
    tokens: bool = False
    reads: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Join:
    """Rows of a state in front of the tokens of a call.

    Attributes:
        node: number of the node that joins them.
        tag: of what it gives.
        stop: the token behind the last one.
        rows: how many there are.
    """

    node: int
    tag: Tag
    stop: Length
    rows: Length


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register the rule of operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


class Interpreter:
    """The values of a graph.

    Args:
        graph: after the passes that give states.
        tokens: the size of the axis of tokens.
        states: of the graph.
        multiple: what the number of tokens is a multiple of, where its name does not say it.

    Attributes:
        piece: the number of tokens of a call; ``past`` that of the calls before.
        multiple: what both are multiples of.
        followed: the nodes, by number.
        joins: rows of states in front of tokens, by the past's name.
        carried: pasts whose node gives their present.
        sums: values that are added up over the tokens of a call, by the number of the node.
        turned: those of them that turn a past of linear attention. What is added up from the end of
            a call may turn its keys and queries, where it turns its past as well.
        continued: states that are added to a running sum, by the number of its node.
    """

    def __init__(
        self, graph: gs.Graph, tokens: str, states: Collection[State], multiple: int = 1
    ) -> None:
        self.graph = graph
        self._sizes: dict[str, Length] = {}
        if multiple > 1 and tokens.isidentifier():
            self._sizes[tokens] = of(multiple) * symbol(f"{tokens}/{multiple}")
        self.piece = self.size(tokens)
        ((_, multiple),) = self.piece.terms
        self.multiple = multiple
        self.past = of(multiple) * symbol(PAST)
        self.symbols = self.piece.symbols | {PAST}
        self.states = {state.past: state for state in states}
        growing = {s.shape[s.growing_axis] for s in states if s.growing_axis is not None}
        self._sizes |= {str(size): self.past for size in growing}
        self.followed: list[Followed] = []
        self.joins: dict[str, Join] = {}
        self.carried: set[str] = set()
        self.sums: dict[int, str] = {}
        self.turned: set[str] = set()
        self.continued: dict[int, set[str]] = {}
        self._values: list[dict[str, TokenValue]] = [{}]
        self._makers: list[dict[str, int]] = [{}]
        self._at: list[int] = []
        self._outer: gs.Node | None = None
        for tensor in graph.inputs:
            self._values[-1][tensor.name] = self._given(tensor)

    def run(self) -> None:
        """Follow every node."""
        for node in self.graph.nodes:
            self.visit(node)

    # Queries of rules

    @property
    def number(self) -> int:
        """The number of the node that is followed."""
        return self._at[-1]

    @property
    def own(self) -> Followed:
        """The node that is followed."""
        return self.followed[self._at[-1]]

    @property
    def end(self) -> Length:
        """The token behind the last one of a call."""
        return self.past + self.piece

    @property
    def whole(self) -> Span:
        """The tokens of a call."""
        return Span(self.past, self.end)

    def value(self, tensor: gs.Tensor) -> TokenValue:
        """Return what is known of a tensor."""
        for scope in reversed(self._values):
            if tensor.name in scope:
                return scope[tensor.name]
        return self._stored(tensor)

    def inputs(self, node: gs.Node) -> list[TokenValue]:
        """Return the values of a node's inputs that are there."""
        return [self.value(t) for t in node.inputs if not t.is_empty()]

    def optional(self, node: gs.Node, place: int) -> TokenValue | None:
        """Return the value of an input, None where it is left out."""
        there = len(node.inputs) > place and not node.inputs[place].is_empty()
        return self.value(node.inputs[place]) if there else None

    def integers(self, node: gs.Node, place: int, attribute: str = "") -> list[int] | None:
        """Return integers that an input, or an attribute of older operators, gives.

        Raises:
            MixingError: they are there, and are not known.
        """
        if attribute and attribute in node.attrs:
            return [int(n) for n in np.atleast_1d(np.asarray(node.attrs[attribute]))]
        found = self.lengths(node, place)
        if found is None:
            return None
        numbers = [length.number for length in found]
        if None in numbers:
            raise MixingError("reads places that are not known before it runs")
        return [int(n) for n in numbers if n is not None]

    def lengths(self, node: gs.Node, place: int) -> list[Length] | None:
        """Return numbers that an input gives, as sizes; None where it is left out.

        Raises:
            MixingError: they are not known.
        """
        value = self.optional(node, place)
        if value is None:
            return None
        numbers = value.numbers
        if numbers is None or not all(isinstance(n, Length) for n in numbers.flat):
            raise MixingError("reads sizes or places that are not known before it runs")
        return list(numbers.flat)

    def axis_of(self, size: Length) -> Axis:
        """Return an axis of a size: tokens, where the size is that of tokens."""
        if not size.symbols & self.symbols:
            return fixed(size)
        for length, start in ((self.piece, self.past), (self.end, of(0)), (self.past, of(0))):
            extra = (size - length).number
            if extra is not None:
                first = start - of(max(extra, 0))
                return (Span(first, first + size),)
            times = size.divided(length)
            if times is not None and not times.symbols & self.symbols:
                return (Fixed(times), Span(start, start + length))
        step = self.piece.divided(size)
        if step is not None and step.number:
            return (Span(self.past, self.end, step.number),)
        return (Fixed(size),)

    def axis_size(self, known: Length | float | None, tensor: gs.Tensor, place: int) -> Length:
        """Return the size of an axis: known, or as the graph states it."""
        if isinstance(known, Length):
            return known
        stated = None if tensor.shape is None else tensor.shape[place]
        if stated in (None, ""):
            raise MixingError("makes an axis whose size is not known")
        return self.size(stated)

    def stated(self, tensor: gs.Tensor, faults: frozenset[int] = frozenset()) -> TokenValue:
        """Return a value of which nothing is known but the shape that the graph states."""
        shape = tensor.shape
        if shape is None or any(size in (None, "") for size in shape):
            return TokenValue(None, tokens=True, faults=faults)
        axes = tuple(self.axis_of(self.size(size)) for size in shape)
        return TokenValue(axes, tokens=True, faults=faults)

    def size(self, stated: int | str) -> Length:
        """Return a size that the graph states."""
        return parse(stated, self._sizes)

    def note(self, kind: FlowKind, reach: int | None = None, rows: int | None = 0) -> None:
        """Say what the node that is followed does besides what was said of it."""
        own, order = self.own, list(FlowKind)
        if reach is not None and reach >= (own.reach or 0):
            own.reach, own.rows = reach, rows
        if order.index(kind) > order.index(own.kind):
            own.kind = kind

    def depends_on_piece(self, value: TokenValue) -> bool:
        """Return whether elements depend on where a sequence is cut."""
        if value.by_call:
            return True
        if value.form is not None:
            return bool(value.form.number.symbols & self.symbols)
        numbers = () if value.numbers is None else value.numbers.flat
        return any(isinstance(n, Length) and n.symbols & self.symbols for n in numbers)

    def check_same_everywhere(self, *values: TokenValue) -> None:
        """Check that elements do not depend on where a sequence is cut.

        Raises:
            MixingError: they do.
        """
        for value in values:
            if self.depends_on_piece(value):
                raise MixingError(
                    "computes with the number of tokens of a call, or with positions that begin "
                    "anew in every call",
                    "positions of torch.arange(x.shape[1]) that a table or a function reads get "
                    "an offset; other values must not depend on the length",
                )

    def check_aligned(self, axis: Axis) -> None:
        """Check that a chunk has its tokens at the same places however a sequence is cut.

        Raises:
            MixingError: it has not.
        """
        if any(isinstance(f, Fixed) and f.step and not f.aligned for f in axis):
            raise MixingError(
                "depends on the place of a token in its chunk, which begins anew in every call",
                "let the number of tokens be a multiple of the chunk: --dim, or torch.export.Dim",
            )

    # How nodes are followed

    def visit(self, node: gs.Node) -> None:
        """Follow a node."""
        inputs = self.inputs(node)
        number, outer = len(self.followed), self._outer or node
        followed = Followed(node, outer, tokens=any(v.tokens for v in inputs))
        self.followed.append(followed)
        self._at.append(number)
        key = node.op if node.domain in STANDARD else f"{node.domain}:{node.op}"
        try:
            if key not in RULES:
                raise MixingError(
                    f"is {key}, an operator that is not followed",
                    "write it in standard operators",
                )
            outputs = list(RULES[key](self, node))
        except MixingError as fault:
            outputs = self._faulty(node, inputs, fault)
        except UNEXPECTED as error:  # a graph that its operators do not allow
            log.debug("%s %r is not followed", node.op, node.name, exc_info=error)
            outputs = self._faulty(node, inputs, MixingError("is not followed as it is written"))
        self._at.pop()
        for tensor, value in zip(node.outputs, outputs, strict=False):
            self._keep(tensor, value, number)
        followed.tokens = any(value.tokens for value in outputs)
        followed.reads = {
            maker for t in self._read(node) for maker in [self.maker(t.name)] if maker is not None
        }

    def follow_body(self, body: gs.Graph, given: Mapping[str, TokenValue]) -> list[TokenValue]:
        """Follow the nodes of a body; return what it gives."""
        self._values.append(dict(given))
        self._makers.append({})
        before, self._outer = self._outer, self._outer or self.own.node
        for node in body.nodes:
            self.visit(node)
        self._outer = before
        found = [self.value(tensor) for tensor in body.outputs]
        self._values.pop()
        self._makers.pop()
        return found

    def captured(self, body: gs.Graph) -> list[TokenValue]:
        """Return the values around a body that it reads."""
        inside = {t.name for t in body.inputs} | {o.name for n in body.nodes for o in n.outputs}
        read = (t for node in body.nodes for t in self._read(node))
        return [self.value(t) for t in (*read, *body.outputs) if t.name not in inside]

    def _read(self, node: gs.Node) -> Iterable[gs.Tensor]:
        """Yield what a node reads, and its bodies of the values around them."""
        yield from (t for t in node.inputs if not t.is_empty())
        for body in (a for a in node.attrs.values() if isinstance(a, gs.Graph)):
            for inner in body.nodes:
                yield from self._read(inner)
            yield from body.outputs

    def maker(self, name: str) -> int | None:
        """Return the number of the node that makes a value; None of inputs and constants."""
        return next((scope[name] for scope in reversed(self._makers) if name in scope), None)

    def _keep(self, tensor: gs.Tensor, value: TokenValue, number: int) -> None:
        if tensor.is_empty():
            return
        if value.tag is None and value.axes is not None:
            value = replace(value, tag=Tag.of((number, tensor.name), value.axes))
        self._values[-1][tensor.name] = value
        self._makers[-1][tensor.name] = number

    def _faulty(
        self, node: gs.Node, inputs: Sequence[TokenValue], fault: MixingError
    ) -> list[TokenValue]:
        faults = frozenset[int]().union(*(v.faults for v in inputs))
        # Behind a node that mixes tokens not every shape is known: that is not another fault.
        if not any(v.axes is None and v.faults for v in inputs):
            number = self.number if fault.at is None else fault.at
            blamed = self.followed[number]
            blamed.kind = FlowKind.MIXING
            blamed.reason, blamed.advice = (
                blamed.reason or str(fault),
                blamed.advice or fault.advice,
            )
            faults |= {number}
        if fault.values is not None:
            return [replace(v, faults=faults) for v in fault.values]
        own = self.own
        if not own.tokens:  # nothing depends on the values of tokens yet
            return [replace(self.stated(t, faults), tokens=False) for t in node.outputs]
        return [self.stated(t, faults) for t in node.outputs]

    def _given(self, tensor: gs.Tensor) -> TokenValue:
        """Return the value of an input of the graph."""
        state = self.states.get(tensor.name)
        shape = tensor.shape
        if shape is None:
            return TokenValue(None, tokens=True)
        if state is None:
            axes = tuple(self.axis_of(self.size(size)) for size in shape)
            return TokenValue(axes, tokens=bool(spans(axes)), tag=Tag.of(tensor.name, axes))
        axes = tuple(fixed(self.size(size)) for size in shape)
        if state.op == FIRST_CALL:
            return TokenValue(axes, tag=Tag.of(tensor.name, axes))
        found = TokenValue(axes, time=Time.BEFORE, tokens=True, states=frozenset({tensor.name}))
        if state.op == POSITIONS:
            return replace(found, numbers=array([self.past]), time=Time.ALWAYS, tokens=False)
        return replace(found, tag=Tag.of(tensor.name, axes))

    def _stored(self, tensor: gs.Tensor) -> TokenValue:
        """Return the value of a constant."""
        if not isinstance(tensor, gs.Constant):
            return TokenValue(None, tokens=True)
        axes = tuple(fixed(of(size)) for size in tensor.shape)
        small = np.prod(tensor.shape, dtype=np.int64) <= SMALL
        values = tensor.values if small and not is_external(tensor) else None
        found = TokenValue(axes, tag=Tag.of(tensor.name, axes))
        if values is None or values.dtype.kind not in "iubf":
            return found
        return replace(found, numbers=array(values))


POSITIONS = "Positions"
"""Op of the state that counts tokens, see ``graph.states``."""


def is_external(tensor: gs.Constant) -> bool:
    """Return whether the values of a constant are in another file."""
    lazy = tensor._values if isinstance(tensor._values, LazyValues) else None
    return lazy is not None and bool(lazy.tensor.external_data)
