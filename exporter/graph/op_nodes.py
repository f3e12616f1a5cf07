"""Nodes of linexport's operators in a graph, as their declarations see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.errors import OpError
from linexport.graph.edit import producer
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.plugins.ops.op import ACTIVATION, Node, Op, StatePort


def view_of(node: gs.Node, op: Op) -> Node:
    """Return a node with the shapes of the inputs that it has.

    Raises:
        OpError: a shape is unknown.
    """
    formal = op.input_names
    given = {n: t for n, t in zip(formal, node.inputs, strict=False) if not t.is_empty()}
    for name, tensor in given.items():
        if tensor.shape is None:
            raise OpError(f"{op.name} {node.name!r}: the shape of its input {name} is unknown.")
    present = tuple(name if name in given else "" for name in formal)
    return Node(node.op, node.attrs, present, {n: tuple(known_shape(t)) for n, t in given.items()})


def state_type(node: gs.Node, op: Op, port: StatePort) -> np.dtype[np.generic]:
    """Return the type of a state of a node."""
    element = op.element_type(op.input_names[port.past], node.attrs)
    return np.dtype(node.inputs[0].dtype if element == ACTIVATION else element)


@dataclass(frozen=True)
class Start:
    """Where a graph says what a state begins with.

    Attributes:
        reader: the node of the state, or what turns its past.
        place: of the input of that node.
    """

    reader: gs.Node
    place: int

    @property
    def tensor(self) -> gs.Tensor:
        """The beginning of the state; absent where the op decides."""
        inputs = self.reader.inputs
        return inputs[self.place] if self.place < len(inputs) else gs.Variable.empty()

    def put(self, tensor: gs.Tensor) -> None:
        """Have the state begin with another tensor."""
        while len(self.reader.inputs) <= self.place:
            self.reader.inputs.append(gs.Variable.empty())
        self.reader.inputs[self.place] = tensor


def start_of(
    node: gs.Node, port: StatePort, known: Values, is_start: Callable[[gs.Tensor], bool]
) -> Start | None:
    """Return where a state begins with a value of some kind, or with what its op begins with.

    A past may be the product of such a value with signs or turns of the tokens at hand, see
    ``match.emit.signed_decay``, ``match.emit.complex_diagonal`` and
    ``models.flash_linear_attention.mamba3``; None where it is another one.

    Args:
        node: of an op.
        port: a state of the op.
        known: values of the graph.
        is_start: whether a value is of that kind.
    """
    own = Start(node, port.past)
    turn = None if own.tensor.is_empty() else producer(_unshaped(own.tensor))
    if turn is not None and turn.op in ("Mul", "MatMul"):
        first, *others = sorted(range(2), key=lambda i: not is_start(turn.inputs[i]))
        # A start times a stored number is one, which no call may multiply again.
        turns = not any(is_start(turn.inputs[i]) or _is_stored(turn, i, known) for i in others)
        if is_start(turn.inputs[first]) and turns:
            return Start(turn, first)
    return own if own.tensor.is_empty() or is_start(own.tensor) else None


def _is_stored(node: gs.Node, place: int, known: Values) -> bool:
    tensor = node.inputs[place]
    return isinstance(tensor, gs.Constant) or known.numbers(tensor) is not None


def _unshaped(tensor: gs.Tensor) -> gs.Tensor:
    """Return what a tensor is a sum of, or the same numbers in another shape or type."""
    node = producer(tensor)
    moved = node is not None and node.op in ("Cast", "ReduceSum", "Reshape")
    return _unshaped(node.inputs[0]) if node is not None and moved else tensor
