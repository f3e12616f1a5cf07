"""Steps of a loop over tokens, traced one by one -> Scan.

    y_t = f(h_t, x_t),  h_t = g(h_{t-1}, x_t),  t = 0 ... 6          becomes      Scan of f and g

``loops`` marks the values y_0 ... y_6. Backwards from them, values of the same operator at every
step are compared: what is the same at every step stays outside of the loop; what takes element t
of a tensor is a scanned input; what depends on earlier steps alone is the state; numbers that grow
by the same amount are a range. All else is computed in the body. That the loop goes on like this
at other lengths is assumed here, and checked beside the original afterwards.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.trace.loops import DOMAIN, MARK

log = logging.getLogger(__name__)

Steps = tuple[str, ...]
"""A value at each step; the last may be missing ("") where nothing reads it."""

ENOUGH = 4
"""Steps that are compared at least."""


class NotALoopError(Exception):
    """Steps that do not repeat."""


def roll(model: onnx.ModelProto) -> None:
    """Replace marked steps in place.

    Raises:
        NotALoopError: they differ by more than their position.
    """
    graph, count = model.graph, itertools.count()
    last: dict[str, str] = {}
    for node in [n for n in graph.node if n.domain == DOMAIN and n.op_type == MARK]:
        last |= _Loop(graph, node, count).write()
        _sort_and_prune(graph)
    _name_last_states(graph, last)
    kept = [o for o in model.opset_import if o.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)


@dataclass
class _Body:
    """The body of a Scan and what it is given."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    names: dict[Steps, str] = field(default_factory=dict)
    scanned: list[tuple[str, str, int]] = field(default_factory=list)
    """Name inside, name outside, axis."""
    states: list[tuple[str, Steps, Steps]] = field(default_factory=list)
    """Name inside, values before each step, values after it."""


class _Loop:
    """One loop, from its marked values backwards."""

    def __init__(self, graph: onnx.GraphProto, mark: onnx.NodeProto, count: Iterator[int]) -> None:
        self.graph, self.mark, self.count = graph, mark, count
        self.producer = {o: n for n in graph.node for o in n.output}
        self.constants = {i.name: i for i in graph.initializer}
        self.types = {v.name: v for v in [*graph.value_info, *graph.input, *graph.output]}
        self.numbers: dict[object, str] = {}
        self.same: dict[str, str] = {}
        self.stamps: dict[str, int] = {}
        for node in graph.node:
            self._number(node)
        self.steps: Steps = tuple(map(self._one, mark.input[1:]))
        if len(self.steps) < ENOUGH:
            raise NotALoopError("it has too few steps")
        self.body = _Body()
        self.outside: list[onnx.NodeProto] = []
        self.last: dict[Steps, str] = {}
        self.added: list[onnx.TensorProto] = []
        self.folded: dict[str, str] = {}

    def write(self) -> dict[str, str]:
        """Put the Scan in the place of the marked steps.

        Returns:
            The Scan's outputs by the values that are its last states.
        """
        result = self._value(self.steps)
        done = 0
        while done < len(self.body.states):
            _, _, after = self.body.states[done]
            self._value(after)
            done += 1
        return self._emit(result)

    def _one(self, name: str) -> str:
        """Return one name for all values that are computed in the same way."""
        return self.same.get(name, name)

    def _number(self, node: onnx.NodeProto) -> None:
        """Name equal values alike, and find the last token that each depends on."""
        inputs = [self._one(i) for i in node.input]
        given = [self._constant_key(i) or i for i in inputs]
        attributes = tuple(a.SerializeToString() for a in node.attribute)
        for i, output in enumerate(node.output):
            key = (node.domain, node.op_type, attributes, tuple(given), i)
            self.same[output] = self.numbers.setdefault(key, output)
        token = self._token(node)
        stamps = [self.stamps.get(i, -1) for i in inputs]
        # Of a shape or a type, no token.
        stamps = {"Shape": [], "CastLike": stamps[:1]}.get(node.op_type, stamps)
        last = max([-1, *stamps, -1 if token is None else token[1]])
        self.stamps.update({o: max(last, self.stamps.get(o, -1)) for o in node.output})

    def _small(self, name: str) -> bool:
        found = self.constants.get(name)
        return found is not None and bool(found.raw_data) and len(found.raw_data) <= 64

    def _constant_key(self, name: str) -> tuple[int, tuple[int, ...], bytes] | None:
        found = self.constants.get(name)
        if found is None or not self._small(name):
            return None
        return found.data_type, tuple(found.dims), found.raw_data

    def _number_of(self, name: str) -> np.ndarray | None:
        """Return a constant, behind the casts and reshapes that exporters put after it."""
        found = self.constants.get(name)
        if found is not None:
            return numpy_helper.to_array(found) if self._small(name) else None
        node = self.producer.get(name)
        if node is None or node.op_type not in ("Cast", "Reshape"):
            return None
        value = self._number_of(node.input[0])
        if value is None or node.op_type == "Cast":
            kind = 0 if value is None else node.attribute[0].i
            return None if value is None else value.astype(helper.tensor_dtype_to_np_dtype(kind))
        shape = self._number_of(node.input[1])
        return None if shape is None else value.reshape(shape)

    def _token(self, node: onnx.NodeProto) -> tuple[str, int, int, bool] | None:
        """Return data, number, axis and whether the axis stays, of one element of a tensor."""
        if node.op_type == "Gather":
            index = self._number_of(node.input[1])
            if index is None or index.size != 1 or index < 0:
                return None
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            return self._element(node.input[0], int(index.item()), axis, index.ndim == 1)
        if node.op_type == "Slice" and len(node.input) >= 4:
            given = [self._number_of(i) for i in node.input[1:]]
            if any(g is None or g.size != 1 for g in given):
                return None
            start, end, axis, *step = (int(g.item()) for g in given if g is not None)
            if start >= 0 and end == start + 1 and step in ([], [1]):
                return self._element(node.input[0], start, axis, True)
        return None

    def _element(
        self, data: str, number: int, axis: int, kept: bool
    ) -> tuple[str, int, int, bool] | None:
        """Return an element along an axis whose length varies."""
        found = self.types.get(data)
        dims = found.type.tensor_type.shape.dim if found is not None else []
        if not dims or not dims[axis % len(dims)].dim_param:
            return None
        return self._one(data), number, axis % len(dims), kept

    def _value(self, steps: Steps) -> str:
        """Return the name of a value in the body, from what it is at each step."""
        known = [s for s in steps if s]
        if len(known) < ENOUGH - 1:
            raise NotALoopError("its steps reach back too far")
        if len(set(known)) == 1:
            return self._unchanged(known[0])
        key = steps[:-1]
        if steps[-1]:
            self.last[key] = steps[-1]
        if key in self.body.names:
            return self.body.names[key]
        producers = [self.producer.get(s) for s in known]
        for find in (self._scanned, self._counted, self._state, self._computed):
            name = find(steps, known, producers)
            if name:
                self.body.names[key] = name
                return name
        raise NotALoopError(f"{known[0]} and {known[1]} differ")

    def _unchanged(self, name: str) -> str:
        """Return a value from outside; a number behind casts as the number it is."""
        if name not in self.producer:
            return name
        value = self._number_of(name)
        if value is None:
            return name
        if name not in self.folded:
            self.folded[name] = self._constant(value)
        return self.folded[name]

    def _scanned(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return element t of a tensor."""
        tokens = [self._token(p) if p is not None else None for p in producers]
        if tokens[0] is None:
            return ""
        data, start, axis, kept = tokens[0]
        if any(t != (data, start + i, axis, kept) for i, t in enumerate(tokens)):
            return ""
        if start:
            return ""
        name = self._fresh("token")
        self.body.scanned.append((name, data, axis))
        self._declare(name, known[0], drop=axis if kept else None)
        if not kept:
            return name
        wide = self._fresh("token")
        axes = self._integers([axis])
        self.body.nodes.append(helper.make_node("Unsqueeze", [name, axes], [wide]))
        return wide

    def _counted(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return numbers of equal distance, such as t + 1."""
        numbers = [n for n in map(self._number_of, known) if n is not None and n.size == 1]
        if len(numbers) != len(known):
            return ""
        values = np.array([n.item() for n in numbers])
        kind = helper.np_dtype_to_tensor_dtype(numbers[0].dtype)
        distance = values[1] - values[0]
        if not np.allclose(np.diff(values), distance, rtol=1e-6):
            return ""
        first = numbers[0]
        scalar = self._constant(np.array(0, np.int64))
        one = self._constant(np.array(1, np.int64))
        names = [self._fresh("count") for _ in range(5)]
        self.outside += [
            helper.make_node("Reshape", [self.mark.input[0], self._integers([])], [names[0]]),
            helper.make_node("Range", [scalar, names[0], one], [names[1]]),
            helper.make_node("Cast", [names[1]], [names[2]], to=kind),
            helper.make_node(
                "Mul", [names[2], self._constant(np.array(distance, first.dtype))], [names[3]]
            ),
            helper.make_node("Add", [names[3], self._constant(first.reshape(()))], [names[4]]),
        ]
        name = self._fresh("count")
        self.body.scanned.append((name, names[4], 0))
        self.types[name] = helper.make_tensor_value_info(name, kind, [])
        if not first.ndim:
            return name
        wide = self._fresh("count")
        shape = self._integers(list(first.shape))
        self.body.nodes.append(helper.make_node("Reshape", [name, shape], [wide]))
        return wide

    def _state(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return the state that a step takes over from the one before it."""
        last, *later = (self.stamps.get(s, -1) for s in known)
        if last >= 0 or later != list(range(len(later))):
            return ""
        name = self._fresh("state")
        self._declare(name, known[1])
        self.body.states.append((name, steps, (*steps[1:], "")))
        return name

    def _computed(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return what the same operator computes at every step."""
        if any(p is None for p in producers):
            return ""
        model = producers[1]
        for producer in producers:
            alike = (
                producer.op_type == model.op_type
                and producer.domain == model.domain
                and len(producer.input) == len(model.input)
                and [a.SerializeToString() for a in producer.attribute]
                == [a.SerializeToString() for a in model.attribute]
            )
            if not alike:
                return ""
        places = [
            next(i for i, o in enumerate(p.output) if self._one(o) == s)
            for p, s in zip(producers, known, strict=True)
        ]
        if len(set(places)) != 1:
            return ""
        missing = len(steps) - len(known)
        inputs = []
        for i in range(len(model.input)):
            if not model.input[i]:
                inputs.append("")
                continue
            found = tuple(self._one(p.input[i]) for p in producers)
            inputs.append(self._value((*found, *[""] * missing)))
        outputs = [self._fresh(model.op_type.lower()) for _ in model.output]
        copy = onnx.NodeProto()
        copy.CopyFrom(model)
        copy.name = self._fresh(model.name or model.op_type)
        del copy.input[:], copy.output[:]
        copy.input.extend(inputs)
        copy.output.extend(outputs)
        self.body.nodes.append(copy)
        for own, original in zip(outputs, model.output, strict=True):
            if original in self.types:
                self._declare(own, original)
        return outputs[places[0]]

    def _emit(self, result: str) -> dict[str, str]:
        body = self.body
        if not body.scanned:
            raise NotALoopError("it reads no tokens")
        after = [self.body.names.get(a[:-1]) for _, _, a in body.states]
        if any(a is None for a in after):
            raise NotALoopError("a state has no next value")
        results = []
        for name in [*map(str, after), result]:
            # Outputs have names of their own, and are computed inside.
            own = self._fresh("next")
            body.nodes.append(helper.make_node("Identity", [name], [own]))
            self._declare(own, name)
            results.append(own)
        inputs = [s for s, _, _ in body.states] + [name for name, _, _ in body.scanned]
        graph = helper.make_graph(
            body.nodes,
            self._fresh("loop"),
            [self.types[i] for i in inputs],
            [self.types[r] for r in results],
        )
        graph.value_info.extend(
            self.types[o] for n in body.nodes for o in n.output if o in self.types
        )
        finals = [self._fresh("last") for _ in body.states]
        begin = [self._begin(b[0], b[1]) for _, b, _ in body.states]
        scan = helper.make_node(
            "Scan",
            [*begin, *(outside for _, outside, _ in body.scanned)],
            [*finals, *self.mark.output],
            self._fresh("Scan"),
            body=graph,
            num_scan_inputs=len(body.scanned),
            scan_input_axes=[axis for _, _, axis in body.scanned],
        )
        nodes = [*self.outside, scan]
        old = [n for n in self.graph.node if n is not self.mark]
        del self.graph.node[:]
        self.graph.node.extend([*old, *nodes])
        self.graph.initializer.extend(self.added)
        ends = [self.last.get(after[:-1]) for _, _, after in body.states]
        return {end: final for end, final in zip(ends, finals, strict=True) if end}

    def _begin(self, before: str, first: str) -> str:
        """Return the state before the first step, of the shape that it has later."""
        own, later = (self._shape(x) for x in (before, first))
        if own == later:
            return before
        shape, wide = self._fresh("shape"), self._fresh("begin")
        self.outside += [
            helper.make_node("Shape", [first], [shape]),
            helper.make_node("Expand", [before, shape], [wide]),
        ]
        return wide

    def _shape(self, name: str) -> list[object] | None:
        found = self.types.get(name)
        if found is None:
            constant = self.constants.get(name)
            return None if constant is None else list(constant.dims)
        return [d.dim_param or d.dim_value for d in found.type.tensor_type.shape.dim]

    def _declare(self, name: str, like: str, drop: int | None = None) -> None:
        found = self.types.get(like)
        if found is None and like in self.constants:
            kind = self.constants[like]
            found = helper.make_tensor_value_info(like, kind.data_type, list(kind.dims))
        if found is None:
            raise NotALoopError(f"the type of {like} is unknown")
        own = onnx.ValueInfoProto()
        own.CopyFrom(found)
        own.name = name
        if drop is not None:
            del own.type.tensor_type.shape.dim[drop]
        self.types[name] = own

    def _fresh(self, stem: str) -> str:
        return f"loop_{next(self.count)}_{stem}"

    def _integers(self, values: list[int]) -> str:
        return self._constant(np.array(values, np.int64))

    def _constant(self, value: np.ndarray) -> str:
        name = self._fresh("number")
        self.added.append(numpy_helper.from_array(value, name))
        self.constants[name] = self.added[-1]
        return name


def _name_last_states(graph: onnx.GraphProto, last: dict[str, str]) -> None:
    """Let what reads a state after its last step read the Scan's."""
    for node in [n for n in graph.node if any(o in last for o in n.output)]:
        (end,) = node.output
        scan = next(n for n in graph.node if last[end] in n.output)
        scan.output[list(scan.output).index(last[end])] = end
        graph.node.remove(node)
    _sort_and_prune(graph)


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
        waiting += [(i, False) for i in _read(node)]
    del graph.node[:]
    graph.node.extend(nodes)
    names = {o for n in nodes for o in n.output}
    for kept, whole in (
        ([v for v in graph.value_info if v.name in names], graph.value_info),
        ([i for i in graph.initializer if i.name in used], graph.initializer),
    ):
        del whole[:]
        whole.extend(kept)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node reads, in its bodies too."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node if attribute.HasField("g") else ():
            yield from _read(inner)
