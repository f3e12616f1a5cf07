"""Steps of a loop over tokens, traced one by one -> Scan.

    y_t = f(h_t, x_t),  h_t = g(h_{t-1}, x_t),  t = 0 ... 6          becomes      Scan of f and g

``loops`` marks the values y_0 ... y_6; ``loop_body`` finds f and g. What is read of the last step
after the loop is read of the last step that the Scan makes. That the loop goes on like this at
other lengths is assumed here, and checked against the original afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import onnx
from onnx import helper

from linexport.graph.walk import reads
from linexport.trace.loops.body import LoopBody, LoopState, NotALoopError
from linexport.trace.loops.capture import DOMAIN
from linexport.trace.loops.first_step import start_of
from linexport.trace.loops.unrolled import Unrolled

__all__ = ["NotALoopError", "roll"]


def roll(model: onnx.ModelProto) -> None:
    """Replace marked steps in place.

    Raises:
        NotALoopError: they differ by more than their position, or a step is read from outside.
    """
    graph, count = model.graph, itertools.count()
    marks = [n for n in graph.node if n.domain == DOMAIN]
    if not marks:
        return
    _cast_to_types(graph)
    unrolled = Unrolled(graph)
    loops = [_Loop(unrolled, mark, count) for mark in marks]
    ends = _ends(graph, unrolled, loops)
    _rename_outputs(graph, ends)
    nodes = [n for n in graph.node if n.domain != DOMAIN]
    for loop in loops:
        nodes += loop.write({name: inner for name, (own, inner) in ends.items() if own is loop})
        graph.initializer.extend(loop.body.added)
        made = (o for node in loop.body.outside for o in node.output)
        graph.value_info.extend(unrolled.types[o] for o in made if o in unrolled.types)
    _replace(graph.node, nodes)
    _sort_and_prune(graph)
    _check_steps(graph, unrolled, {0, 1, *(s.width for loop in loops for s in loop.body.scanned)})
    _replace(model.opset_import, [o for o in model.opset_import if o.domain != DOMAIN])


def _cast_to_types(graph: onnx.GraphProto) -> None:
    """Write CastLike as Cast: a step would carry a value that is read for its type alone."""
    known = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input)}
    known |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "CastLike" and known.get(node.input[1]):
            like = node.input.pop()
            node.op_type = "Cast"
            node.attribute.append(helper.make_attribute("to", known[like]))


class _Loop:
    """A mark, and what it becomes."""

    def __init__(self, unrolled: Unrolled, mark: onnx.NodeProto, count: Iterator[int]) -> None:
        self.unrolled, self.count = unrolled, count
        self.length, *self.steps = mark.input
        (self.output,) = mark.output
        try:
            self.body = self._body(first=0)
        except NotALoopError as reason:
            self.body = self._from_second(reason)
        self.finals = [self._fresh("last") for _ in self.body.states]
        start = start_of(unrolled, self.body, self.steps[0]) if self.body.first else None
        if start is not None:
            self.body.begin_at_first()
            self.begin = list(map(self._filled, self.body.states, start))
        else:
            self.begin = [self._begin(state) for state in self.body.states]

    def _body(self, first: int) -> LoopBody:
        steps = tuple(self.steps[first:])
        return LoopBody(self.unrolled, self.length, steps, self._fresh, first)

    def _from_second(self, reason: NotALoopError) -> LoopBody:
        """Return the body of a loop whose first result is computed before it.

        Raises:
            NotALoopError: it is not such a loop either; the error is ``reason``.
        """
        try:
            return self._body(first=1)
        except NotALoopError:
            raise reason from None

    def reads(self) -> Iterator[str]:
        """Yield what is read from around the loop."""
        yield from self.steps[: self.body.first]
        yield from (s.data for s in self.body.scanned)
        yield from self.begin
        for node in (*self.body.outside, *self.body.nodes):
            yield from reads(node)

    def write(self, ends: Mapping[str, str]) -> Iterator[onnx.NodeProto]:
        """Yield the Scan, and what is read of its last step.

        Args:
            ends: names in the body, by values outside that they are after the last step.
        """
        body, after = self.body, self.body.next_values()
        emitted = [x for x in dict.fromkeys(ends.values()) if body.first or x not in after]
        wholes = {inner: self._fresh("whole") for inner in emitted}
        inputs = [s.name for s in body.states] + [s.name for s in body.scanned]
        inner = self._inner(inputs, [*after, body.result, *emitted])
        result = self._fresh("whole") if body.first else self.output
        yield from body.outside
        yield helper.make_node(
            "Scan",
            [*self.begin, *(s.data for s in body.scanned)],
            [*self.finals, result, *wholes.values()],
            self._fresh("Scan"),
            body=inner,
            num_scan_inputs=len(body.scanned),
            scan_input_axes=[s.axis for s in body.scanned],
        )
        if body.first:
            yield from self._behind(self.steps[0], result, self.output)
        for name, own in ends.items():
            whole = wholes.get(own)
            if whole is None:
                yield helper.make_node("Identity", [self.finals[after.index(own)]], [name])
                continue
            if body.first:
                known = dict(zip(after, self.begin, strict=True)) | {body.result: self.steps[0]}
                if own not in known:
                    raise NotALoopError(f"{name} is read after it, and is not known before it")
                whole = self._fresh("whole")
                yield from self._behind(known[own], wholes[own], whole)
            yield helper.make_node("Gather", [whole, self._integer(-1)], [name], axis=0)

    def _behind(self, first: str, rest: str, result: str) -> Iterator[onnx.NodeProto]:
        """Yield what puts values behind a first one; the last of them is of no token."""
        axis, wide, longer = self._integer(0, 1), self._fresh("first"), self._fresh("longer")
        yield helper.make_node("Unsqueeze", [first, axis], [wide])
        yield helper.make_node("Concat", [wide, rest], [longer], axis=0)
        ends = [self._integer(0, 1), self._integer(-1, 1), axis]
        yield helper.make_node("Slice", [longer, *ends], [result])

    def _integer(self, value: int, rank: int = 0) -> str:
        return self.body.constant(np.full([1] * rank, value, np.int64))

    def _inner(self, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.GraphProto:
        """Return the body as a graph, whose outputs have names of their own."""
        body, types = self.body, self.unrolled.types
        nodes, results = list(body.nodes), []
        for name in outputs:
            own = self._fresh("next")
            nodes.append(helper.make_node("Identity", [name], [own]))
            body.declare(own, name)
            results.append(own)
        given, made = ([types[x] for x in names] for names in (inputs, results))
        graph = helper.make_graph(nodes, self._fresh("loop"), given, made)
        graph.value_info.extend(types[o] for n in nodes for o in n.output if o in types)
        return graph

    def _begin(self, state: LoopState) -> str:
        """Return the state before the first step, of the shape that it has later."""
        before, first = state.before[:2]
        own, later = (self.unrolled.shape(x) for x in (before, first))
        if own == later:
            return before
        shape, wide = self._fresh("shape"), self._fresh("begin")
        self.body.outside += [
            helper.make_node("Shape", [first], [shape]),
            helper.make_node("Expand", [before, shape], [wide]),
        ]
        return wide

    def _filled(self, state: LoopState, number: float) -> str:
        """Return a number in the shape of a state, whose dynamic sizes are those of a token."""
        parts = []
        for size in self.unrolled.shape(state.name) or []:
            if isinstance(size, int):
                parts.append(self._integer(size, 1))
                continue
            parts.append(self._fresh("size"))
            data, axis = self._with_size(size)
            node = helper.make_node("Shape", [data], parts[-1:], start=axis, end=axis + 1)
            self.body.outside.append(node)
        shape, begin = self._fresh("shape"), self._fresh("begin")
        constant = self.body.constant(np.full((), number, np.float32))
        self.body.outside += [
            helper.make_node("Concat", parts, [shape], axis=0),
            helper.make_node("Expand", [constant, shape], [begin]),
        ]
        return begin

    def _with_size(self, size: object) -> tuple[str, int]:
        """Return a tensor of tokens that has a size, and its axis."""
        for scanned in self.body.scanned:
            sizes = self.unrolled.shape(scanned.data) or []
            if size in sizes:
                return scanned.data, sizes.index(size)
        raise NotALoopError(f"the size {size} of a state is not that of a token")

    def _fresh(self, stem: str) -> str:
        return f"loop_{next(self.count)}_{stem}"


def _ends(
    graph: onnx.GraphProto, unrolled: Unrolled, loops: Sequence[_Loop]
) -> dict[str, tuple[_Loop, str]]:
    """Return values of last steps that are read after their loop, by loop and name in its body."""
    found: dict[str, tuple[_Loop, str]] = {}
    written = {loop.output: loop for loop in loops}
    waiting, seen = [o.name for o in graph.output], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        end = next(((o, inner) for o in loops if (inner := o.body.end(name))), None)
        if name in written:
            waiting += written[name].reads()
        elif end is not None:
            found[name] = end
        elif name in unrolled.producer:
            waiting += reads(unrolled.producer[name])
    return found


def _rename_outputs(graph: onnx.GraphProto, ends: Mapping[str, object]) -> None:
    """Give values of unrolled steps other names, that a Scan may take theirs."""
    for node in graph.node:
        node.output[:] = [f"{o}/unrolled" if o in ends else o for o in node.output]


def _check_steps(graph: onnx.GraphProto, unrolled: Unrolled, widths: Set[int]) -> None:
    """Check that no step is left that belongs to a certain token, or chunk.

    Args:
        graph: the graph.
        unrolled: what it was.
        widths: of the tokens that loops read.

    Raises:
        NotALoopError: one is.
    """
    for node in graph.node:
        token = unrolled.token(node)
        if token is not None and token.number and token.width in widths:
            raise NotALoopError(
                f"something is read of a single step besides the last, which takes token "
                f"{token.number} of {token.data}"
            )


def _sort_and_prune(graph: onnx.GraphProto) -> None:
    """Order nodes by what they read; drop those that nothing reads."""
    producer = {o: n for n in graph.node for o in n.output if o}
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    used: set[str] = set()
    waiting = [(o.name, False) for o in reversed(graph.output)]
    while waiting:
        name, ready = waiting.pop()
        used.add(name)
        node = producer.get(name)
        if node is None or node.output[0] in done:
            continue
        if ready:
            done.add(node.output[0])
            nodes.append(node)
            continue
        waiting.append((name, True))
        waiting += [(i, False) for i in reads(node)]
    names = {o for n in nodes for o in n.output}
    _replace(graph.node, nodes)
    _replace(graph.value_info, [v for v in graph.value_info if v.name in names])
    _replace(graph.initializer, [i for i in graph.initializer if i.name in used])


def _replace(field: Any, values: Sequence[Any]) -> None:
    """Set a repeated field of a message."""
    del field[:]
    field.extend(values)
