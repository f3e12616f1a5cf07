"""Loop that takes tokens by a number that it counts -> Scan over these tokens.

    i = 0
    while i < T:                                  Scan over x:
        h = f(h, x[:, i]); y[:, i] = g(h)    ->       h = f(h, x_t); y_t = g(h)
        i = i + 1

So torch's ``while_loop`` is written, and loops of other exporters. See ``step_numbers`` for what
counts the steps, ``token_loops`` for what they read and write. A loop that runs a known number of
times is left to ``apply_loop_bodies``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult, rewrite_matches
from linexport.graph.copies import name_apart
from linexport.graph.edit import END, index_of
from linexport.graph.operators import SIZES_ONLY
from linexport.graph.partial_eval import Values
from linexport.graph.shapes import completed_shapes
from linexport.graph.tensors import known_shape
from linexport.loops.row_writes import RowWrite
from linexport.loops.step_nodes import copy_given, with_steps_along
from linexport.loops.token_loops import Read, TokenLoop, token_loop
from linexport.match.emit.layout import Nodes, written_size
from linexport.passes import simplify

log = logging.getLogger(__name__)

INT64 = np.dtype(np.int64)


def run(graph: gs.Graph) -> PassResult:
    """Write every loop over tokens as a Scan."""
    bodies = [node.attrs["body"] for node in graph.nodes if node.op == "Loop"]
    if not bodies:
        return PassResult(False)
    simpler = [simplify.run(body).modified for body in bodies]
    for body in bodies:
        body.cleanup().toposort()
    with completed_shapes(graph, bodies=True):
        return PassResult(rewrite_matches(graph, _match, _write, log).modified or any(simpler))


def _match(graph: gs.Graph, node: gs.Node) -> TokenLoop | None:
    # Bodies of two loops may have the same names: what is known of one is not of the other.
    return token_loop(node, Values.of_graph(graph)) if node.op == "Loop" else None


def _write(graph: gs.Graph, loop: gs.Node, found: TokenLoop) -> None:
    place = index_of(graph, loop)
    writer = _Writer(found, loop.name or loop.outputs[0].name)
    taken = {id(node) for node in found.invariant}
    found.body.nodes = [node for node in found.body.nodes if id(node) not in taken]
    name_apart(found.invariant, graph, writer.name)
    scan = writer.write()
    graph.nodes[place : place + 1] = [
        *found.invariant,
        *writer.before.nodes,
        scan,
        *writer.behind.nodes,
    ]


class _Writer:
    """The nodes that stand for a loop over tokens.

    Attributes:
        name: begins the names of all of them.
        before: nodes in front of the Scan.
        behind: nodes that read what it gives.
    """

    def __init__(self, found: TokenLoop, name: str) -> None:
        self.found, self.name = found, name
        self.before, self.behind = Nodes(f"{name}/before", []), Nodes(f"{name}/behind", [])
        length = found.length
        self._length = f"{name}/steps" if length is None else written_size(length)
        self._begins, self._outputs = list(found.loop.inputs[2:]), list(found.loop.outputs)
        # Tokens, their axis, and what the body calls the one of its step.
        self._scanned: dict[tuple[str, int, int], tuple[gs.Tensor, int, gs.Variable]] = {}

    def write(self) -> gs.Node:
        """Return the Scan."""
        found, body = self.found, self.found.body
        count = len(found.states)
        for read in found.reads:
            self._read(read)
        self._read_begins()
        rows = {place: self._row(place, write) for place, write in found.writes.items()}
        finals = [body.outputs[1 + place] for place in found.carried]
        body.outputs = [*finals, *body.outputs[1 + count :], *rows.values()]
        body.cleanup()
        self._scan_numbers()
        scanned = list(self._scanned.values())
        body.inputs = [found.states[place] for place in found.carried]
        body.inputs += [token for _, _, token in scanned]
        body.toposort()
        copy_given(body)
        found.loop.inputs.clear()
        found.loop.outputs.clear()
        given = [*(self._outputs[place] for place in found.carried), *self._outputs[count:]]
        given += [self._rows(place, row) for place, row in rows.items()]
        self._give_others()
        return gs.Node(
            "Scan",
            f"{self.name}/Scan",
            {
                "body": body,
                "num_scan_inputs": len(scanned),
                "scan_input_axes": [axis for _, axis, _ in scanned],
            },
            [*(self._begins[place] for place in found.carried), *(t for t, _, _ in scanned)],
            given,
        )

    def _read(self, read: Read) -> None:
        """Let a node of the body take its token of what the Scan goes through."""
        node, token = read.node, self._token(read.data, read.axis, read.offset)
        axes = list(range(read.axis, read.axis + read.rank))
        node.op, node.attrs = "Unsqueeze" if axes else "Identity", {}
        node.inputs = [token, self._integers(axes)] if axes else [token]

    def _token(self, data: gs.Tensor, axis: int, offset: int) -> gs.Variable:
        key = data.name, axis, offset
        if key not in self._scanned:
            tokens = data
            if not self.found.is_all(data, axis, offset):
                start, end = self._integers([offset]), self._number_behind(offset)
                tokens = _cut(self.before, data, axis, start, end, self._length)
            shape = [size for place, size in enumerate(known_shape(data)) if place != axis]
            token = gs.Variable(f"{self.name}/{data.name}/{axis}_{offset}", data.dtype, shape)
            self._scanned[key] = tokens, axis, token
        return self._scanned[key][2]

    def _read_begins(self) -> None:
        """Let nodes read what a state begins with, where that is the same for them."""
        found = self.found
        for node in (*found.invariant, *found.body.nodes):
            places = [found.place_of(tensor) for tensor in node.inputs]
            for number, place in enumerate(places):
                sized = node.op in SIZES_ONLY and place in found.writes
                if place is not None and (place in found.passed or sized):
                    node.inputs[number] = self._begins[place]

    def _row(self, place: int, write: RowWrite) -> gs.Variable:
        """Return the row that a step writes."""
        state = self.found.states[place]
        shape = [size for axis, size in enumerate(known_shape(state)) if axis != write.axis]
        row = gs.Variable(f"{self.name}/{state.name}/row", state.dtype, shape)
        axes = [] if write.squeezed is None else [write.squeezed]
        op = "Squeeze" if axes else "Identity"
        given = [write.row, *([self._integers(axes)] if axes else [])]
        self.found.body.nodes.append(gs.Node(op, f"{row.name}/{op}", {}, given, [row]))
        return row

    def _rows(self, place: int, row: gs.Variable) -> gs.Variable:
        """Put the rows of all steps in the place of those before; returns them, steps first."""
        write, whole = self.found.writes[place], self._outputs[place]
        rows = gs.Variable(f"{row.name}s", row.dtype, [self._length, *known_shape(row)])
        if self.found.is_all(self.found.states[place], write.axis, write.offset):
            self.behind.nodes.append(with_steps_along(write.axis, rows, whole))
            return rows
        middle = gs.Variable(f"{rows.name}/written", rows.dtype)
        self.behind.nodes.append(with_steps_along(write.axis, rows, middle))
        begin, last = self._begins[place], self._number_behind(write.offset)
        first, start, end = (self._integers([n]) for n in (0, write.offset, END))
        above = _cut(self.behind, begin, write.axis, first, start, write.offset)
        below = _cut(self.behind, begin, write.axis, last, end, f"{rows.name}/below")
        name, attributes = f"{rows.name}/Concat", {"axis": write.axis}
        parts = [above, middle, below]
        self.behind.nodes.append(gs.Node("Concat", name, attributes, parts, [whole]))
        return rows

    def _scan_numbers(self) -> None:
        """Let the Scan go through the numbers that the body still reads."""
        counters = self.found.numbers.counters
        numbers = [(self.found.body.inputs[0], 0)]
        numbers += [(self.found.states[place], begin) for place, begin in counters.items()]
        for number, begin in numbers:
            if not number.outputs:
                continue
            start = gs.Constant(self.before.name("start"), np.array(begin, np.int64))
            one = gs.Constant(self.before.name("one"), np.array(1, np.int64))
            last = self._number_behind(begin)
            end = self.before.add("Squeeze", [last, self._integers([0])], INT64)
            counted = self.before.add("Range", [start, end, one], INT64, shape=[self._length])
            tokens = self.before.cast(counted, np.dtype(number.dtype))
            token = gs.Variable(f"{self.name}/{number.name}", number.dtype, [])
            self._scanned[number.name, 0, 0] = tokens, 0, token
            given = [token, self._integers([1] * len(number.shape))]
            own = gs.Node("Reshape", f"{token.name}/Reshape", {}, given, [number])
            self.found.body.nodes.append(own)

    def _give_others(self) -> None:
        """Compute what the loop gives of states that stay as they are, or count."""
        for place in self.found.passed:
            self._give("Identity", [self._begins[place]], self._outputs[place])
        for place, begin in self.found.numbers.counters.items():
            last = self.behind.cast(
                self._number_behind(begin), np.dtype(self._outputs[place].dtype)
            )
            shape = self._integers([1] * len(known_shape(self.found.states[place])))
            self._give("Reshape", [last, shape], self._outputs[place])

    def _give(self, op: str, given: Sequence[gs.Tensor], output: gs.Variable) -> None:
        self.behind.nodes.append(gs.Node(op, f"{output.name}/{op}", {}, given, [output]))

    def _number_behind(self, offset: int) -> gs.Tensor:
        """Return the number of steps plus ``offset``, of shape (1,)."""
        bound, more = self.found.count
        known = self.before.cast(bound, INT64)
        found = self.before.add("Reshape", [known, self._integers([1])], INT64, shape=[1])
        if more + offset:
            found = self.before.add(
                "Add", [found, self._integers([more + offset])], INT64, shape=[1]
            )
        return found

    def _integers(self, values: list[int]) -> gs.Constant:
        return gs.Constant(self.before.name("integers"), np.asarray(values, np.int64))


def _cut(
    nodes: Nodes, data: gs.Tensor, axis: int, start: gs.Tensor, end: gs.Tensor, size: int | str
) -> gs.Variable:
    """Write a slice of some size along an axis."""
    axes = gs.Constant(nodes.name("axis"), np.array([axis], np.int64))
    shape = [size if place == axis else own for place, own in enumerate(known_shape(data))]
    return nodes.add("Slice", [data, start, end, axes], np.dtype(data.dtype), shape=shape)


PASS = Pass(
    name="convert_token_loops",
    stage="canonicalise",
    ensures="a Loop that takes one token in each step, by a number that it counts, is a Scan",
    run=run,
)
