"""Loops whose steps take one token each, by a number that they count: what they read and write.

    h, y, i -> f(h, x[:, i]), y with row i, i + 1      of h, the rows of y, and the tokens of x

What the body computes of no state and no number is the same in every step.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.edit import is_of_weights, original_of
from linexport.graph.monomials import parse
from linexport.graph.operators import NOT_A_FUNCTION, SIZES_ONLY
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.loops.induction import StepNumbers
from linexport.loops.row_writes import RowWrite, written_row
from linexport.match.roles.subgraph import reads

MOST_STEPS = 128
"""Steps that are written in a row at most: as many as large models have layers."""


class Read(NamedTuple):
    """A node that takes the token of its step.

    Attributes:
        node: of the body.
        data: all tokens, which are computed outside of the loop.
        axis: that of the tokens.
        offset: token n + ``offset`` is taken in step n.
        rank: how many axes of size 1 the node has in the place of ``axis``.
    """

    node: gs.Node
    data: gs.Tensor
    axis: int
    offset: int
    rank: int


class TokenLoop:
    """A Loop, and what its steps read, write and carry.

    Attributes:
        states: inputs of the body, by their place.
        passed: places of the states that stay as they begin.
        writes: rows of tensors, by the place of the state that such a tensor is.
        carried: places of all other states that do not count.
        reads: nodes that take tokens.
        invariant: nodes that give the same in every step, in the order of evaluation.
        length: the number of steps, None where it is not a known size.

    Args:
        loop: a Loop.
        known: values of the graph around it; is added to.

    Raises:
        NoMatchError: the number of its steps does not follow from what they count.
    """

    def __init__(self, loop: gs.Node, known: Values) -> None:
        self.loop, self.body = loop, loop.attrs["body"]
        self.numbers = StepNumbers(loop, known)
        self.count = self.numbers.count()
        self.length = self.numbers.size(self.count)
        self.states: dict[int, gs.Variable] = dict(enumerate(self.body.inputs[2:]))
        self.passed = [place for place, t in self.states.items() if self._after(place) is t]
        rows = {place: self._write_of(place) for place in self.states}
        self.writes = {place: write for place, write in rows.items() if write is not None}
        self._varies = {t.name for k, t in enumerate(self.body.inputs) if k - 2 not in self.passed}
        self.invariant = [node for node in self.body.nodes if self._is_invariant(node)]
        if self.count.bound.name in self._varies:
            raise NoMatchError("how often it runs depends on what its steps compute")
        gone = {*self.passed, *self.writes, *self.numbers.counters}
        self.carried = [place for place in self.states if place not in gone]
        self.reads = [r for n in self.body.nodes if (r := self._read_of(n)) is not None]

    def _after(self, place: int) -> gs.Tensor:
        return original_of(self.body.outputs[place + 1])

    def place_of(self, tensor: gs.Tensor) -> int | None:
        """Return the place of the state that a tensor of the body is, before or after the step."""
        sides = zip(self.states.items(), self.body.outputs[1:], strict=False)
        return next((k for (k, t), after in sides if tensor is t or tensor is after), None)

    def _is_invariant(self, node: gs.Node) -> bool:
        """Return whether a node gives the same in every step; those before it are known."""
        if node.op in SIZES_ONLY and self.place_of(node.inputs[0]) in self.writes:
            return True
        # A function of values that no step changes is the same in all steps.
        bodies = any(isinstance(a, gs.Graph) for a in node.attrs.values())
        if bodies or node.op in NOT_A_FUNCTION or any(t.name in self._varies for t in node.inputs):
            self._varies |= {o.name for o in node.outputs}
            return False
        return True

    def _write_of(self, place: int) -> RowWrite | None:
        """Return what is written to a state of which a step reads nothing, and gives nothing."""
        found = written_row(self.numbers, self.states[place], self._after(place))
        # A negative offset would write from the end in the first steps.
        if found is None or found.offset < 0:
            return None
        # Rows written once in each step may be stacked after the loop only if no step reads an
        # earlier row; the number of rows may be read, as it does not change.
        derived = {self.states[place].name}
        for node in self.body.nodes:
            sized = node.op in SIZES_ONLY and self.place_of(node.inputs[0]) == place
            if not sized and any(tensor.name in derived for tensor in reads(node)):
                derived |= {output.name for output in node.outputs}
        others = [t for k, t in enumerate(self.body.outputs) if k != place + 1]
        return None if any(t.name in derived for t in (found.row, *others)) else found

    def _read_of(self, node: gs.Node) -> Read | None:
        if node.op not in ("Gather", "GatherElements", "Slice"):
            return None
        data, places = node.inputs[:2]
        offset = self.numbers.offsets.get(places.name)
        # A negative offset would read from the end in the first steps.
        if data.name in self._varies or data.shape is None or offset is None or offset < 0:
            return None
        if node.op == "Slice":
            axis = self.numbers.axis_of_one(node)
            return None if axis is None else Read(node, data, axis % len(data.shape), offset, 1)
        axis = node.attrs.get("axis", 0) % len(data.shape)
        if node.op == "GatherElements":
            row = [1 if place == axis else size for place, size in enumerate(data.shape)]
            same = places.shape is not None and list(places.shape) == row
            return Read(node, data, axis, offset, 1) if same else None
        one = places.shape is not None and all(size == 1 for size in places.shape)
        return Read(node, data, axis, offset, len(known_shape(places))) if one else None

    def is_all(self, tensor: gs.Tensor, axis: int, offset: int) -> bool:
        """Return whether the steps go through all of a tensor's axis."""
        size = known_shape(tensor)[axis]
        # n = 0 ... size - 1 takes each place once.
        return offset == 0 and size not in (None, "") and self.length == parse(size)


def token_loop(node: gs.Node, known: Values) -> TokenLoop | None:
    """Match a Loop over tokens; None for another operator.

    Raises:
        NoMatchError: the Loop is not over tokens.
    """
    if node.op != "Loop" or node.domain:
        return None
    if len(node.outputs) != len(node.attrs["body"].outputs) - 1 or any(
        output.is_empty() for output in node.outputs
    ):
        raise NoMatchError("it has no name for something that it gives")
    found = TokenLoop(node, known)
    steps = None if found.length is None else found.length.known
    if steps is not None and steps <= MOST_STEPS:
        raise NoMatchError(f"it runs {steps} times, as often as there are layers")
    tokens = [read for read in found.reads if not is_of_weights(read.data)]
    if not tokens:
        raise NoMatchError("its steps take no token of what is computed before it")
    # A Scan of ONNX Runtime takes one step at least.
    if not any(found.is_all(read.data, read.axis, read.offset) for read in tokens):
        raise NoMatchError("its steps do not go through all tokens, and may be none")
    sizes = {known_shape(read.data)[read.axis] for read in found.reads}
    if any(sizes.intersection(found.states[place].shape or ()) for place in found.carried):
        raise NoMatchError(
            "its steps carry what all tokens have, and do not only write a row of it"
        )
    if any(n.outputs[0] is not found.body.outputs[0] for n in found.body.inputs[1].outputs):
        raise NoMatchError("its steps read whether they run")
    return found
