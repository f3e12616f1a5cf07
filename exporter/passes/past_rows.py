"""Rows of the past as states: the last tokens of a value, in front of those at hand.

    seen = [past_inputs_i, x]       present_inputs_i = seen[-r:]

A state has the batch first and a fixed number of rows, zeros before the first token. Where rows
before the first token are something else, a number, the first token or rows that are given,
past_inputs_begun says whether there was a call before:

    seen = [begun ? past_inputs_i : c, x]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.dims import Shape
from linexport.graph.edit import END, is_output
from linexport.graph.monomials import ONE, Size, parse
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.states import CONVOLVED
from linexport.graph.tensors import known_shape, static_size
from linexport.match.emit.layout import written_size
from linexport.match.search.shifts import FIRST, Moved
from linexport.passes import first_call


@dataclass(frozen=True)
class RowsLayout:
    """Where a value has its batch, and what a state of it is like.

    Attributes:
        place: of the axis of the batch; None without a batch.
        heads: that are in the same axis, behind the batch; 1 for the batch alone.
        sizes: of the value.
    """

    place: int | None
    heads: int
    sizes: Shape

    @classmethod
    def of(cls, tensor: gs.Tensor, axis: int, batch: Size | None) -> RowsLayout:
        """Return the layout of a value whose tokens are along an axis.

        Args:
            tensor: the value.
            axis: that of the tokens.
            batch: the size of the batch; None where the graph has none.

        Raises:
            NoMatchError: no state can have its rows.
        """
        sizes = stated_sizes(tensor)
        if sizes is None or tensor.dtype is None:
            raise NoMatchError(f"the sizes or the type of {tensor.name} are not known")
        if batch is None and all(s.known is not None for i, s in enumerate(sizes) if i != axis):
            return cls(None, 1, [written_size(s) for s in sizes])
        for place, size in enumerate(sizes if batch is not None else ()):
            assert batch is not None
            heads = size.divided(batch)
            rest = [s.known for i, s in enumerate(sizes) if i not in (place, axis)]
            alone = place == 0 or heads == ONE
            if place != axis and heads is not None and heads.known and alone and None not in rest:
                return cls(place, heads.known, [written_size(s) for s in sizes])
        shown = [str(s) for s in sizes]
        raise NoMatchError(f"{tensor.name} of the sizes {shown} has no batch, or others that vary")

    def with_rows(self, axis: int, rows: int | str) -> list[int | str]:
        """Return the sizes of the value with another number of tokens."""
        return [rows if i == axis else size for i, size in enumerate(self.sizes)]


@dataclass(frozen=True)
class Line:
    """A value and its rows of the past.

    Attributes:
        seen: both.
        rows: how many are of the past.
    """

    seen: gs.Tensor
    rows: int


class PastRows:
    """Writes such states.

    Args:
        graph: changed in place.
        tokens: the size of their axis, in its inputs.
        stem: of the names of what is written.

    Attributes:
        batch: the size of the batch; None where tokens have no axis in front that is one.
    """

    def __init__(self, graph: gs.Graph, tokens: str, stem: str) -> None:
        self.graph, self._stem = graph, stem
        self._given = next(t for t in graph.inputs if tokens in (t.shape or ()))
        sizes = list(known_shape(self._given))
        self._places = [i for i, size in enumerate(sizes) if size != tokens][:1]
        self._places.append(sizes.index(tokens))
        first = sizes[self._places[0]]
        named = sizes[0] != tokens or isinstance(first, str)
        self.batch = parse(first) if named and len(sizes) > 1 else None
        taken = graph.tensors()
        self._numbers = (n for n in itertools.count() if f"{CONVOLVED[0]}{n}" not in taken)
        self._begun: gs.Variable | None = None
        self._made = 0

    def line(
        self,
        source: gs.Tensor,
        axis: int,
        rows: int,
        fill: float | str,
        given: gs.Tensor | None = None,
    ) -> Line:
        """Put rows of the past in front of a value.

        Args:
            source: the value.
            axis: of its tokens.
            rows: how many.
            fill: what they are before the first token, see ``Moved``.
            given: the value whose last rows these are, where they are given.

        Raises:
            NoMatchError: no state can have its rows.
        """
        layout = RowsLayout.of(source, axis, self.batch)
        past, present = self._state(source, axis, layout, rows)
        ahead = self._turned(past, layout, axis, rows)
        if fill != 0:
            start = self._start(source, axis, layout, rows, fill, given)
            begun = self._begun_like(layout)
            ahead = self._node("Where", [begun, ahead, start], source.dtype, ahead.shape)
        length = f"{rows}+{layout.sizes[axis]}"
        seen = self._node(
            "Concat",
            [ahead, source],
            source.dtype,
            layout.with_rows(axis, length),
            {"axis": axis},
        )
        ends = [self._integers(n) for n in (-rows, END, axis)]
        last = self._node("Slice", [seen, *ends], source.dtype, layout.with_rows(axis, rows))
        self._returned(last, present, layout)
        return Line(seen, rows)

    def real(self, rows: int) -> Line:
        """Return ones for tokens, (B, rows + T), behind zeros for rows before the first one."""
        places = self._places if self.batch is not None else self._places[1:]
        sizes: list[gs.Tensor] = [
            self._node("Shape", [self._given], np.int64, [1], {"start": n, "end": n + 1})
            for n in places
        ]
        if self.batch is None:
            sizes.insert(0, self._integers(1))
        shape = self._node("Concat", sizes, np.int64, [2], {"axis": 0})
        one = {"value": gs.Constant(self._name(), np.ones(1, np.float32))}
        length = known_shape(self._given)[self._places[1]]
        ones = self._node("ConstantOfShape", [shape], np.float32, [self._first(), length], one)
        return self.line(ones, 1, rows, 0)

    def fill(self, value: gs.Variable, line: Line, axis: int, rows: int) -> None:
        """Have a value be the last rows of a line, and the tokens."""
        x = line.seen
        if rows < line.rows:
            ends = [self._integers(n) for n in (line.rows - rows, END, axis)]
            self.graph.nodes.append(gs.Node("Slice", value.name, {}, [x, *ends], [value]))
            return
        for node in list(value.outputs):
            node.inputs = [x if t is value else t for t in node.inputs]

    def place(self, moved: Moved, line: Line, is_source: bool = False) -> None:
        """Have a value be computed from its line.

        Args:
            moved: says which rows of it the value is.
            line: of the value's source.
            is_source: whether another value is to be computed from this one, which then remains.
        """
        result, first = moved.result, line.rows - moved.front
        steps: list[tuple[str, list[gs.Tensor]]] = []
        if first or moved.behind < 0:
            last = moved.behind if moved.behind < 0 else END
            steps.append(("Slice", [self._integers(n) for n in (first, last, moved.axis)]))
        if moved.behind > 0:
            pads = np.zeros((2, len(known_shape(line.seen))), np.int64)
            pads[1, moved.axis] = moved.behind
            end = gs.Constant(self._name(), np.asarray(moved.end, result.dtype))
            steps.append(("Pad", [gs.Constant(self._name(), pads.ravel()), end]))
        x = line.seen
        for op, rest in steps:
            x = self._node(op, [x, *rest], result.dtype, None)
        remains = is_source or is_output(self.graph, result)
        if not steps and remains:
            x = self._node("Identity", [x], result.dtype, None)
        if steps or remains:
            result.inputs[0].outputs, x.inputs[0].outputs = [], [result]
            return
        result.inputs[0].outputs = []
        for node in list(result.outputs):
            node.inputs = [x if t is result else t for t in node.inputs]

    def _state(
        self, source: gs.Tensor, axis: int, layout: RowsLayout, rows: int
    ) -> tuple[gs.Variable, gs.Variable]:
        """Return the input and the output of a state, with the batch first."""
        sizes = layout.with_rows(axis, rows)
        if layout.place is not None:
            del sizes[layout.place]
        heads = [layout.heads] if layout.heads > 1 else []
        shape = [self._first(), *heads, *sizes]
        number = next(self._numbers)
        past, present = (gs.Variable(f"{name}{number}", source.dtype, shape) for name in CONVOLVED)
        self.graph.inputs.append(past)
        self.graph.outputs.append(present)
        return past, present

    def _turned(self, past: gs.Variable, layout: RowsLayout, axis: int, rows: int) -> gs.Variable:
        """Return a state in the layout of its value."""
        shape = layout.with_rows(axis, rows)
        if layout.heads > 1:
            sizes = self._integers(-1, *(int(size) for size in shape[1:]))
            return self._node("Reshape", [past, sizes], past.dtype, shape)
        if layout.place is None:
            return self._node("Squeeze", [past, self._integers(0)], past.dtype, shape)
        if layout.place:
            order = [*range(1, layout.place + 1), 0, *range(layout.place + 1, len(shape))]
            return self._node("Transpose", [past], past.dtype, shape, {"perm": order})
        return past

    def _returned(self, last: gs.Variable, present: gs.Variable, layout: RowsLayout) -> None:
        """Have a state be rows in the layout of its value."""
        op, rest, attrs = "Identity", list[gs.Tensor](), dict[str, Any]()
        if layout.heads > 1:
            sizes = [static_size(present, i) for i in range(1, len(known_shape(present)))]
            op, rest = "Reshape", [self._integers(-1, *sizes)]
        elif layout.place is None:
            op, rest = "Unsqueeze", [self._integers(0)]
        elif layout.place:
            others = [i for i in range(len(layout.sizes)) if i != layout.place]
            op, attrs = "Transpose", {"perm": [layout.place, *others]}
        if op == "Identity":
            last.inputs[0].outputs = [present]
            return
        self.graph.nodes.append(gs.Node(op, present.name, attrs, [last, *rest], [present]))

    def _start(
        self,
        source: gs.Tensor,
        axis: int,
        layout: RowsLayout,
        rows: int,
        fill: float | str,
        given: gs.Tensor | None,
    ) -> gs.Tensor:
        """Return what rows before the first token are."""
        if given is not None:
            ends = (-rows, END)
        elif fill == FIRST:
            given, rows, ends = source, 1, (0, 1)
        else:
            return gs.Constant(self._name(), np.asarray(fill, source.dtype))
        taken = [self._integers(n) for n in (*ends, axis)]
        return self._node("Slice", [given, *taken], source.dtype, layout.with_rows(axis, rows))

    def _begun_like(self, layout: RowsLayout) -> gs.Variable:
        """Return whether there was a call before, with axes as those of a value."""
        if self._begun is None:
            self._begun = self._counted()
        rank, batch = len(layout.sizes), 1 if layout.place is None else layout.sizes[layout.place]
        flag = self._begun
        if layout.heads > 1:
            sizes = self._integers(1, layout.heads)
            flag = self._node("Expand", [flag, sizes], np.bool_, [self._first(), layout.heads])
        shape: Shape = [batch if i == layout.place else 1 for i in range(rank)]
        target = self._integers(*(-1 if i == layout.place else 1 for i in range(rank)))
        return self._node("Reshape", [flag, target], np.bool_, shape)

    def _counted(self) -> gs.Variable:
        """Return (B, 1), true after the first call: a state that becomes one."""
        past = first_call.flag(self.graph, "inputs", self._first())
        zero = gs.Constant(self._name(), np.zeros((), np.float32))
        return self._node("Greater", [past, zero], np.bool_, past.shape)

    def _first(self) -> int | str:
        """Return the first size of a state."""
        return 1 if self.batch is None else written_size(self.batch)

    def _integers(self, *values: int) -> gs.Constant:
        return gs.Constant(self._name(), np.asarray(values, np.int64))

    def _name(self) -> str:
        self._made += 1
        return f"{self._stem}/{self._made}"

    def _node(
        self,
        op: str,
        inputs: list[gs.Tensor],
        dtype: object,
        shape: Sequence[int | str] | None,
        attrs: Mapping[str, object] | None = None,
    ) -> gs.Variable:
        result = gs.Variable(self._name(), dtype, shape)
        self.graph.nodes.append(gs.Node(op, result.name, attrs or {}, inputs, [result]))
        return result
