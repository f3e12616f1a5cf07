"""Values of a loop's steps -> the body of a Scan.

Backwards from the results, values of the same operator at every step are compared: what is the
same at every step is hoisted out of the loop; what takes element t of a tensor, or chunk t, is a
scanned input; what depends on earlier steps alone is the state; numbers that grow by the same
amount are a range. All else is computed in the body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.trace.loops.unrolled import Token, Unrolled, alike

Steps = tuple[str, ...]
"""A value at each step; the last may be missing ("") where nothing reads it."""

MIN_STEPS_COMPARED = 4
"""Steps that are compared at least."""


class NotALoopError(Exception):
    """Steps that do not repeat."""


class LoopState(NamedTuple):
    """A value that a step takes over from the one before it."""

    name: str
    """In the body."""
    before: Steps
    after: Steps


class Scanned(NamedTuple):
    """A tensor of which each step reads one element."""

    name: str
    """In the body."""
    data: str
    axis: int
    whole: str = ""
    """The tensor from its first element on, where ``data`` is turned or the same."""
    width: int = 0
    """Elements of a chunk, see ``Token``."""


@dataclass
class _Known:
    """A value in the body, with its value at each step, as far as these were requested."""

    steps: Steps
    name: str


class LoopBody:
    """The body of one loop, and what it is given.

    Args:
        unrolled: the graph; types and constants of new values are added.
        length: the number of steps, a vector of one.
        steps: the result of each step.
        fresh: makes a name with a stem.
        first: number of the token that the first step reads.

    Attributes:
        result: its name in the body.
        nodes: of the body.
        outside: nodes that compute what the body is given.
        scanned: what is read token by token.
        states: what is handed on.
        ends: names in the body, by the values of the last step.
        added: new constants.

    Raises:
        NotALoopError: steps differ by more than their position.
    """

    def __init__(
        self, unrolled: Unrolled, length: str, steps: Steps, fresh: Callable[[str], str], first: int
    ) -> None:
        self.unrolled, self.length, self.fresh, self.first = unrolled, length, fresh, first
        self.nodes: list[onnx.NodeProto] = []
        self.outside: list[onnx.NodeProto] = []
        self.scanned: list[Scanned] = []
        self.states: list[LoopState] = []
        self.ends: dict[str, str] = {}
        self.added: list[onnx.TensorProto] = []
        self._known: dict[Steps, list[_Known]] = {}
        self._outputs: dict[str, list[str]] = {}
        self._folded: dict[str, str] = {}
        self._computable: dict[Steps, bool] = {}
        if len(steps) < MIN_STEPS_COMPARED:
            raise NotALoopError("it has too few steps")
        self.result = self._value(tuple(map(unrolled.one, steps)))
        for state in self.states:  # more are found on the way
            self._value(state.after)
        if not self.scanned:
            raise NotALoopError("it reads no tokens")

    def next_values(self) -> list[str]:
        """Return what the states become, by their names in the body."""
        found = [self._find(state.after) for state in self.states]
        if None in found:
            raise NotALoopError("a state has no next value")
        return [known.name for known in found if known]

    def end(self, name: str) -> str | None:
        """Return the name in the body of a value of the last step; None where it is not one."""
        node = self.unrolled.producer.get(name)
        if node is None or self.unrolled.number(name) is not None:
            return None
        known = self.ends.get(self.unrolled.one(name)) or self._state_behind(name)
        if node.op_type != "SequenceAt" or known is not None:
            return known
        sequence = self.ends.get(self.unrolled.one(node.input[0]))
        if sequence is None or self.unrolled.number(node.input[1]) is None:
            return None
        return self._copy(node, [sequence, node.input[1]])[0]

    def _state_behind(self, name: str) -> str | None:
        """Return the name in the body of a state behind the last step, where a value is one.

        Where a step reads what it was before, no result is computed of it.
        """
        last = self.unrolled.one(name)
        for state in self.states:
            if not state.after[-1] and self._follows(state.after[-2], last):
                self._value((*state.after[:-1], last))
                return self.ends.get(last)
        return None

    def _follows(self, one: str, next: str) -> bool:
        """Return whether a value is at the last step what another is one step before it."""
        if one == next:
            return self.unrolled.stamps.get(one, -1) < 0  # is of no token, so of no step
        if any(k.steps[-2:] == (one, next) for known in self._known.values() for k in known):
            return True
        producers = [self.unrolled.producer.get(x) for x in (one, next)]
        first, second = producers
        if first is None or second is None:
            return False
        token = self.unrolled.token(first)
        if token is not None:
            return self.unrolled.token(second) == token._replace(number=token.number + 1)
        inputs = zip(first.input, second.input, strict=False)
        return alike(first, second) and all(
            self._follows(self.unrolled.one(a), self.unrolled.one(b)) for a, b in inputs
        )

    def begin_at_first(self) -> None:
        """Read tokens from the first one on."""
        self.first = 0
        self.scanned = [scanned._replace(data=scanned.whole) for scanned in self.scanned]

    def declare(self, name: str, like: str, drop: int | None = None) -> None:
        """Give a new value the type of another, without one of its dimensions."""
        found = self.unrolled.types.get(like)
        if found is None and like in self.unrolled.constants:
            kind = self.unrolled.constants[like]
            found = helper.make_tensor_value_info(like, kind.data_type, list(kind.dims))
        if found is None:
            raise NotALoopError(f"the type of {like} is unknown")
        own = onnx.ValueInfoProto()
        own.CopyFrom(found)
        own.name = name
        if drop is not None:
            del own.type.tensor_type.shape.dim[drop]
        self.unrolled.types[name] = own

    def constant(self, value: np.ndarray) -> str:
        """Add a constant."""
        name = self.fresh("number")
        self.added.append(numpy_helper.from_array(value, name))
        self.unrolled.constants[name] = self.added[-1]
        return name

    def _value(self, steps: Steps) -> str:
        """Return the name of a value in the body, from what it is at each step."""
        known = [s for s in steps if s]
        if len(known) < MIN_STEPS_COMPARED - 1:
            raise NotALoopError("its steps reach back too far")
        if len(set(known)) == 1:
            return self._unchanged(known[0])
        found = self._find(steps)
        if found is None:
            found = _Known(steps, self._found(steps, known))
            self._known.setdefault(steps[: MIN_STEPS_COMPARED - 1], []).append(found)
        elif steps[-1] and not found.steps[-1]:
            self._complete(found, steps)
        if steps[-1]:
            self.ends.setdefault(steps[-1], found.name)
        return found.name

    def _find(self, steps: Steps) -> _Known | None:
        """Return the value that has these steps; how many are missing differs from use to use."""
        for known in self._known.get(steps[: MIN_STEPS_COMPARED - 1], []):
            if all(a == b for a, b in zip(known.steps, steps, strict=True) if a and b):
                return known
        return None

    def _complete(self, known: _Known, steps: Steps) -> None:
        """Note the last step of a value that was found without it."""
        known.steps = steps
        producer, outputs = self.unrolled.producer.get(steps[-1]), self._outputs.get(known.name)
        if producer is None or outputs is None:
            return
        self.ends |= dict(zip(map(self.unrolled.one, producer.output), outputs, strict=True))
        producers = [self.unrolled.producer[s] for s in steps]
        for i, given in enumerate(producer.input):
            if given:
                self._value(tuple(self.unrolled.one(p.input[i]) for p in producers))

    def _found(self, steps: Steps, known: list[str]) -> str:
        producers = [self.unrolled.producer.get(s) for s in known]
        for find in (self._token, self._counted, self._state, self._computed):
            name = find(steps, known, producers)
            if name:
                return name
        raise NotALoopError(f"{known[0]} and {known[1]} differ")

    def _unchanged(self, name: str) -> str:
        """Return a value from outside; a number behind casts as the number it is."""
        if name not in self.unrolled.producer:
            return name
        value = self.unrolled.number(name)
        if value is None:
            return name
        if name not in self._folded:
            self._folded[name] = self.constant(value)
        return self._folded[name]

    def _token(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return element t of a tensor."""
        tokens = [self.unrolled.token(p) if p is not None else None for p in producers]
        first = tokens[0]
        if first is None:
            return ""
        if any(t != first._replace(number=i) for i, t in enumerate(tokens, self.first)):
            return ""
        name = self.fresh("token")
        data = self._chunks(first) if first.width > 1 else self._from_first(first)
        self.scanned.append(Scanned(name, data, first.axis, first.data, first.width))
        self.declare(name, known[0], drop=first.axis if first.width == 1 else None)
        if first.width != 1:
            return name
        wide = self.fresh("token")
        axes = self.constant(np.array([first.axis], np.int64))
        self.nodes.append(helper.make_node("Unsqueeze", [name, axes], [wide]))
        return wide

    def _chunks(self, token: Token) -> str:
        """Return the tensor with an axis of chunks in front of that of their elements."""
        if self.first:
            raise NotALoopError("the first of its chunks is another")
        parts = [self.fresh("size") for _ in range(2)]
        self.outside += [
            helper.make_node("Shape", [token.data], parts[:1], end=token.axis),
            helper.make_node("Shape", [token.data], parts[1:], start=token.axis + 1),
        ]
        sizes = self.constant(np.array([-1, token.width], np.int64))
        shape, name = self.fresh("shape"), self.fresh("chunks")
        self.outside += [
            helper.make_node("Concat", [parts[0], sizes, parts[1]], [shape], axis=0),
            helper.make_node("Reshape", [token.data, shape], [name]),
        ]
        self.declare(name, token.data)
        dims = self.unrolled.types[name].type.tensor_type.shape.dim
        length, width = dims[token.axis].dim_param, onnx.TensorShapeProto.Dimension()
        multiple, width.dim_value = f"{token.width}*", token.width
        whole = length.startswith(multiple)
        dims[token.axis].dim_param = (
            length.removeprefix(multiple) if whole else f"({length}//{token.width})"
        )
        dims.insert(token.axis + 1, width)
        return name

    def _from_first(self, token: Token) -> str:
        """Return the tensor, turned so that it begins with the first token that a step reads."""
        if not self.first:
            return token.data
        # The first token, which no step reads, goes last: ONNX Runtime crashes in a Scan of none.
        parts, bounds = [], ((self.first, np.iinfo(np.int64).max), (0, self.first))
        for start, end in bounds:
            ends = [self.constant(np.array([n], np.int64)) for n in (start, end, token.axis)]
            parts.append(self.fresh("part"))
            self.outside.append(helper.make_node("Slice", [token.data, *ends], parts[-1:]))
        name = self.fresh("turned")
        self.outside.append(helper.make_node("Concat", parts, [name], axis=token.axis))
        return name

    def _counted(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return numbers of equal distance, such as t + 1."""
        numbers = [n for n in map(self.unrolled.number, known) if n is not None and n.size == 1]
        if len(numbers) != len(known):
            return ""
        values = np.array([n.item() for n in numbers])
        distance = values[1] - values[0]
        if not np.allclose(np.diff(values), distance, rtol=1e-6):
            return ""
        first = numbers[0]
        if not distance:
            return self.constant(first)
        kind = helper.np_dtype_to_tensor_dtype(first.dtype)
        counts = self._range(first.reshape(()), np.array(distance, first.dtype), kind)
        name = self.fresh("count")
        self.scanned.append(Scanned(name, counts, 0))
        self.unrolled.types[name] = helper.make_tensor_value_info(name, kind, [])
        if not first.ndim:
            return name
        wide = self.fresh("count")
        shape = self.constant(np.array(first.shape, np.int64))
        self.nodes.append(helper.make_node("Reshape", [name, shape], [wide]))
        return wide

    def _range(self, first: np.ndarray, distance: np.ndarray, kind: int) -> str:
        """Return first + distance * t for every token, computed outside."""
        names = [self.fresh("count") for _ in range(5)]
        zero, one = (self.constant(np.array(n, np.int64)) for n in (0, 1))
        scalar = self.constant(np.zeros(0, np.int64))
        self.outside += [
            helper.make_node("Reshape", [self.length, scalar], [names[0]]),
            helper.make_node("Range", [zero, names[0], one], [names[1]]),
            helper.make_node("Cast", [names[1]], [names[2]], to=kind),
            helper.make_node("Mul", [names[2], self.constant(distance)], [names[3]]),
            helper.make_node("Add", [names[3], self.constant(first)], [names[4]]),
        ]
        return names[4]

    def _state(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return the state that a step takes over from the one before it."""
        own = self._is_taken_over(known) and not self._is_computed(steps, known, producers)
        others = self._is_behind, self._is_iterated
        if not own and not any(holds(known, producers) for holds in others):
            return ""
        name = self.fresh("state")
        self.declare(name, known[1])
        self.states.append(LoopState(name, steps, (*steps[1:], "")))
        return name

    def _is_taken_over(self, known: list[str]) -> bool:
        """Return whether each of these depends on the tokens before its own step alone."""
        last, *later = (self.unrolled.stamps.get(s, -1) for s in known)
        return last < self.first and later == list(range(self.first, self.first + len(later)))

    def _is_behind(self, known: list[str], producers: list) -> bool:
        """Return whether these begin with a constant and are at most tokens behind their step.

        So is an imaginary part, where tokens are added to the real part alone.
        """
        stamps = [self.unrolled.stamps.get(s, -1) for s in known]
        late = stamps[0] < 0 and all(s < self.first + i for i, s in enumerate(stamps))
        if None in producers[1:] or not late or stamps[-1] < self.first:
            return False
        same = [p for p in producers if p is not None and alike(p, producers[1])]
        return len(same) == len(producers) - 1 and same[0] is producers[1]

    def _is_iterated(self, known: list[str], producers: list) -> bool:
        """Return whether each of these is the same function of the one before it, of no token.

        So is a sum of powers by which a retention is normalised.
        """
        if any(self.unrolled.stamps.get(s, -1) >= 0 for s in known) or None in producers[1:]:
            return False
        begins = producers[0] is None or not alike(producers[0], producers[1])
        same = all(alike(p, producers[1]) for p in producers[1:])
        return begins and same and all(map(self._reads, known[1:], known))

    def _reads(self, name: str, source: str) -> bool:
        """Return whether a value is computed of another one."""
        waiting, seen = [name], {name}
        while waiting:
            node = self.unrolled.producer.get(waiting.pop())
            given = {self.unrolled.one(i) for i in node.input} - seen if node is not None else set()
            if source in given:
                return True
            seen |= given
            waiting += given
        return False

    def _is_computed(self, steps: Steps, known: list[str], producers: list) -> bool:
        """Return whether the same operator computes these of states that begin in another way.

        Both S and g S can be what a step takes over; one of them is enough, and S is what begins
        with a constant.
        """
        if any(p is None or not alike(p, producers[1]) for p in producers):
            return False
        if steps not in self._computable:
            self._computable[steps] = all(map(self._is_available, self._inputs(steps, producers)))
        return self._computable[steps]

    def _is_available(self, steps: Steps) -> bool:
        """Return whether a value can be had without a state that the same operator begins."""
        known = [s for s in steps if s]
        if len(known) < MIN_STEPS_COMPARED - 1:
            return False
        if len(set(known)) == 1 or self._find(steps) is not None:
            return True
        producers: list = [self.unrolled.producer.get(s) for s in known]
        if any(p is None or not alike(p, producers[1]) for p in producers):
            return self._is_taken_over(known) or self._is_behind(known, producers)
        if self.unrolled.token(producers[0]) is not None:
            return True
        return self._is_computed(steps, known, producers)

    def _inputs(self, steps: Steps, producers: list) -> list[Steps]:
        """Return the steps of what nodes read; "" where a node leaves an input out."""
        missing = [""] * (len(steps) - len(producers))
        return [
            (*(self.unrolled.one(p.input[i]) for p in producers), *missing)
            for i in range(len(producers[1].input))
        ]

    def _computed(self, steps: Steps, known: list[str], producers: list) -> str:
        """Return what the same operator computes at every step."""
        if any(p is None or not alike(p, producers[1]) for p in producers):
            return ""
        model = producers[1]
        places = {
            next(i for i, o in enumerate(p.output) if self.unrolled.one(o) == s)
            for p, s in zip(producers, known, strict=True)
        }
        if len(places) != 1:
            return ""
        inputs = [
            self._value(found) if given else ""
            for given, found in zip(model.input, self._inputs(steps, producers), strict=True)
        ]
        outputs = self._copy(model, inputs)
        if len(known) == len(steps):
            ends = map(self.unrolled.one, producers[-1].output)
            self.ends |= dict(zip(ends, outputs, strict=True))
        result = outputs[places.pop()]
        self._outputs[result] = outputs
        return result

    def _copy(self, node: onnx.NodeProto, inputs: list[str]) -> list[str]:
        """Add a node to the body that computes the same from other inputs."""
        outputs = [self.fresh(node.op_type.lower()) for _ in node.output]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = self.fresh(node.name or node.op_type)
        copy.input[:], copy.output[:] = inputs, outputs
        self.nodes.append(copy)
        for own, original in zip(outputs, node.output, strict=True):
            if original in self.unrolled.types:
                self.declare(own, original)
        return outputs
