"""Numbers that a Loop counts: the values of its body that say the step, and how many there are.

    i = 0; while i < T: ...; i = i + 1      ->      i = n in step n = 0, 1, ..., of T steps

Every value whose elements are all n + c, with one known integer c, is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.edit import original_of, producer
from linexport.graph.monomials import Size
from linexport.graph.operators import LAYOUT
from linexport.graph.partial_eval import Values

KEEPS = LAYOUT | {"Gather"}
"""Operators whose results are elements of their first input."""

INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)

COMPARED = {"Less": 0, "LessOrEqual": 1}
"""Comparisons of a number with a bound, by how many more steps the bound takes."""

MIRRORED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual"}


class StepCount(NamedTuple):
    """A number of steps: a bound, and what is added to it."""

    bound: gs.Tensor
    more: int


class StepNumbers:
    """The numbers of one Loop's steps.

    Attributes:
        known: values of integers, of the graph and of the body.
        offsets: by name, the c of every value n + c.
        counters: of the states that count, by their place, the number they begin with.

    Args:
        loop: in the graph that ``known`` is of.
        known: is added to.
    """

    def __init__(self, loop: gs.Node, known: Values) -> None:
        self.loop, self.known = loop, known
        self.body: gs.Graph = loop.attrs["body"]
        for node in self.body.nodes:
            known.visit(node)
        begins = {place: self._number(t) for place, t in enumerate(loop.inputs[2:])}
        self.counters = {place: n for place, n in begins.items() if n is not None}
        while True:
            self.offsets = self._followed()
            # Induction: assume that all of these count, and drop those that then do not. What is
            # left is consistent: each is n + c before a step and n + 1 + c after it.
            counted = {p: n for p, n in self.counters.items() if self._counts(p, n)}
            if counted == self.counters:
                break
            self.counters = counted

    def _counts(self, place: int, begin: int) -> bool:
        """Return whether a state is one more after every step, if those that count do."""
        after = original_of(self.body.outputs[place + 1])
        return self.offsets.get(after.name) == begin + 1

    def _followed(self) -> dict[str, int]:
        states = self.body.inputs[2:]
        found = {self.body.inputs[0].name: 0}
        found |= {states[place].name: begin for place, begin in self.counters.items()}
        for node in self.body.nodes:
            offset = self._offset(node, found)
            if offset is not None:
                found[node.outputs[0].name] = offset
        return found

    def _offset(self, node: gs.Node, found: Mapping[str, int]) -> int | None:
        given = [found.get(t.name) for t in node.inputs]
        if node.op in KEEPS or (node.op == "Cast" and node.attrs["to"] in INTEGERS):
            of_range = node.op == "Gather" and given[0] is None
            return self._in_range(node.inputs[0], given[1]) if of_range else given[0]
        if node.op == "Slice" and given[0] is None and self._takes_one(node, found):
            return self._in_range(node.inputs[0], given[1])
        if node.op in ("Add", "Sub") and given.count(None) == 1:
            own = given.index(None)
            number = self._number(node.inputs[own])
            if number is not None and (node.op == "Add" or own == 1):
                # (n + c) + k = n + (c + k); k - (n + c) falls as n grows.
                return (given[1 - own] or 0) + (number if node.op == "Add" else -number)
        return None

    def axis_of_one(self, node: gs.Node) -> int | None:
        """Return the axis of which a Slice takes one element, by a number of the step."""
        axes = self.known.numbers(node.inputs[3]) if len(node.inputs) > 3 else np.zeros(1)
        one = axes is not None and axes.size == 1 and self._takes_one(node, self.offsets)
        return int(axes.item()) if axes is not None and one else None

    def _takes_one(self, node: gs.Node, found: Mapping[str, int]) -> bool:
        start, end = (found.get(t.name) for t in node.inputs[1:3])
        whole = len(node.inputs) < 5 or self._number(node.inputs[4]) == 1
        return start is not None and end == start + 1 and whole

    def _in_range(self, tensor: gs.Tensor, offset: int | None) -> int | None:
        """Return the offset of the element at n + ``offset`` of 0, 1, 2, ..."""
        return offset if self.is_range(tensor) else None

    def is_range(self, tensor: gs.Tensor) -> bool:
        """Return whether a tensor is 0, 1, 2, ..., whatever axes of size 1 it has."""
        node = producer(tensor)
        # These keep the elements in order.
        while node is not None and node.op in ("Cast", "Identity", "Reshape", "Unsqueeze"):
            node = producer(node.inputs[0])
        if node is None or node.op != "Range":
            return False
        return self._number(node.inputs[0]) == 0 and self._number(node.inputs[2]) == 1

    def _number(self, tensor: gs.Tensor) -> int | None:
        """Return the integer that all elements of a tensor are."""
        values = None if tensor.is_empty() else self.known.numbers(tensor)
        if values is None or values.dtype.kind != "i" or not values.size:
            return None
        return int(values.flat[0]) if (values == values.flat[0]).all() else None

    def count(self) -> StepCount:
        """Return how many steps there are.

        Raises:
            NoMatchError: it does not follow from a number that the steps count.
        """
        most, going = self.loop.inputs[:2]
        after = original_of(self.body.outputs[0])
        endless = after is self.body.inputs[1] or self._is_true(after)
        # The largest int64 stands for no limit.
        limited = not most.is_empty() and self._number(most) != np.iinfo(np.int64).max
        if not going.is_empty() and endless and not self._is_true(going):
            raise NoMatchError("a condition decides whether it runs at all")
        # Without a condition the trip count alone ends the loop.
        if endless and limited:
            return StepCount(most, 0)
        if limited:
            raise NoMatchError("both a number and a condition end it")
        count, begun = self._compared(after), going if self._is_true(going) else None
        if begun is None and not self._same(self._compared(going, first=True), count):
            raise NoMatchError("what lets it begin is not what lets it go on")
        return count

    def _compared(self, condition: gs.Tensor, *, first: bool = False) -> StepCount:
        """Return the number of steps that a comparison with a bound allows."""
        node = producer(condition)
        if node is None or node.op not in (*COMPARED, *MIRRORED):
            raise NoMatchError("no comparison of a number with a bound ends it")
        number, bound = node.inputs if node.op in COMPARED else node.inputs[::-1]
        offset = self._number(number) if first else self.offsets.get(number.name)
        if offset is None or bound.name in self.offsets:
            raise NoMatchError("what is compared to end it is not counted by its steps")
        # Of the number after the step, which the next one begins with.
        before = offset if first else offset - 1
        return self._plain(StepCount(bound, COMPARED[MIRRORED.get(node.op, node.op)] - before))

    def _plain(self, count: StepCount) -> StepCount:
        """Return the same count with a constant in its bound moved into the offset."""
        node = producer(count.bound)
        if node is None or node.op not in ("Add", "Sub"):
            return count
        number = self._number(node.inputs[1])
        if number is None:
            return count
        # (b + c) + more = b + (c + more)
        added = number if node.op == "Add" else -number
        return self._plain(StepCount(node.inputs[0], count.more + added))

    def _same(self, first: StepCount, second: StepCount) -> bool:
        if first.bound is second.bound:
            return first.more == second.more
        size = self.size(first)
        return size is not None and size == self.size(second)

    def size(self, count: StepCount) -> Size | None:
        """Return a number of steps as a size, None where it is unknown."""
        value = self.known.get(count.bound)
        if value is None or value.size != 1:
            return None
        found = value.item()
        bound = found if isinstance(found, Size) else Size(int(found))
        return bound + Size(count.more) if count.more >= 0 else bound - Size(-count.more)

    def _is_true(self, tensor: gs.Tensor) -> bool:
        value = None if tensor.is_empty() else self.known.numbers(tensor)
        return tensor.is_empty() or (value is not None and bool(value.all()))
