"""Earlier tokens of a value -> the value with its last rows as a state.

    y_t = x_{t-k}                        seen = [past, x]    y = seen[: T]       present = seen[-k:]
    y = f(0 .. 0 ++ x)                   seen = [past, x]    y = f(seen)         present = seen[-r:]
    y = f(given ++ x)                    the same; the past of the first call is given

where f looks back along the tokens by r rows at most: a convolution with gaps or without, a
pooling, an unfolding, sums of slices. In whichever way a delay is written, ``match.search.shifts``
reads it; that f is the same in pieces, ``match.search.in_pieces`` proves. All that looks back at
one value has one state, of as many rows as the farthest of it needs; a delay by one alone is an op.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import NoMatchError, Pass, PassResult
from linexport.graph.operators import LAYOUT, SIZES_ONLY
from linexport.graph.partial_eval import Values
from linexport.graph.shapes import completed_shapes
from linexport.match.forms.token_sizes import TokenSizes
from linexport.match.roles.subgraph import reads
from linexport.match.search.in_pieces import NoWindowError, WindowReader
from linexport.match.search.shifts import ALONG, SELECTING, Moved, MoveReader
from linexport.passes import first_call
from linexport.passes.pads_apart import pads_apart
from linexport.passes.past_rows import Line, PastRows, RowsLayout
from linexport.passes.stateful_causal_conv import becomes_op
from linexport.passes.token_shift import is_token_shift, write_token_shift

log = logging.getLogger(__name__)

CANDIDATES = {*ALONG, *LAYOUT, *SELECTING}
"""Operators whose output may be earlier tokens."""


def run(graph: gs.Graph) -> PassResult:
    """Give every value that is looked back at a state, where other nodes tell the token axis."""
    length = sequence_axis.symbol(graph)
    if length is None:
        log.debug("nothing gets a state: no causal node tells the axis of the tokens")
        return PassResult(False)
    with completed_shapes(graph):
        return PassResult(_Lines(graph, length).write())


class _Lines:
    """Earlier tokens that a graph reads, and their replacement."""

    def __init__(self, graph: gs.Graph, length: str) -> None:
        self.graph, self.sizes = graph, TokenSizes(length)
        known = Values.of_graph(graph)
        self._is_start = partial(first_call.is_given, graph, tokens=length, known=known)
        self._is_op = partial(becomes_op, graph, known=known, length=length)
        self.padded = pads_apart(graph, self.sizes, known, self._is_op)
        self.rows = PastRows(graph, length, "delay_lines")

    def write(self) -> bool:
        """Change the graph; returns whether there was anything to change."""
        found = [moved for moved in self._moved() if self._has_batch(moved)]
        longer = {m.result.name: m for m in found if not m.is_delay}
        reader, kept = WindowReader(self.graph, self.sizes, longer), dict[str, Moved]()
        for name, moved in longer.items():
            readers = [n for n in moved.result.outputs if n.op not in SIZES_ONLY]
            if name in kept or all(map(self._is_op, readers)):
                continue
            try:
                window = reader.read(moved)
            except NoWindowError as reason:
                log.debug("what sees %s is left as it is: %s", name, reason)
                continue
            kept |= {m.result.name: m for m in window.given}
        found = [m for m in found if m.is_delay or m.result.name in kept]
        for pads in self.padded:
            if pads.made.name not in kept:
                pads.undo()
        for moved in found:
            log.info("%s looks back at %s by %d", moved.result.name, moved.source.name, moved.front)
        self._replace(found)
        return bool(found)

    def _has_batch(self, moved: Moved) -> bool:
        try:
            RowsLayout.of(moved.source, moved.axis, self.rows.batch)
        except NoMatchError as reason:
            log.debug("%s is left as it is: %s", moved.result.name, reason)
            return False
        return True

    def _moved(self) -> list[Moved]:
        """Return the values that are read, and are rows of other values."""
        reader = MoveReader(self.graph, self.sizes, self._is_start)
        alive, found = {id(t) for t in self.graph.outputs}, list[Moved]()
        for node in reversed(list(self.graph.nodes)):
            if not any(id(o) in alive for o in node.outputs):
                continue
            moved = reader.read(node.outputs[0]) if node.op in CANDIDATES else None
            if moved is not None:
                found.append(moved)
                if moved.result.shape is None:
                    moved.result.shape = moved.sizes()
                alive.add(id(moved.source))
            elif node.op not in SIZES_ONLY:
                alive |= {id(t) for t in reads(node)}
        return found[::-1]

    def _replace(self, found: Sequence[Moved]) -> None:
        groups = dict[tuple[str, int, float | str, str], list[Moved]]()
        sources = {moved.source.name for moved in found}
        for moved in found:
            if not moved.front:
                self.rows.place(moved, Line(moved.source, 0), moved.result.name in sources)
                continue
            start = moved.start.name if moved.start is not None else ""
            key = (moved.source.name, moved.axis, moved.fill, start)
            groups.setdefault(key, []).append(moved)
        for (_, axis, fill, _), group in groups.items():
            if all(map(is_token_shift, group)):
                for moved in group:
                    write_token_shift(self.graph, moved)
                continue
            rows, first = max(m.front for m in group), group[0]
            line = self.rows.line(first.source, axis, rows, fill, first.start)
            for moved in group:
                self.rows.place(moved, line, moved.result.name in sources)


PASS = Pass(
    name="delay_lines",
    stage="stream",
    requires="linear attention is fused: its nodes tell which axis holds the tokens",
    ensures="what looks back along the tokens by a constant reads rows of the past, a state",
    run=run,
)
