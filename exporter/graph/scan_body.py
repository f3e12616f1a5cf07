"""Loops over tokens: whether the state after a token is linear in the state before it.

S_t = F_t(S_{t-1}) + b_t        F_t: sums, products with values that are not states, moves
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind
from linexport.graph.operators import SIZES_ONLY, Trait, having, is_affine

State = TypeVar("State", bound=Hashable)

SELECTS = having(Trait.SELECTS)


def has_directions(node: gs.Node) -> bool:
    """Return whether a Scan goes backwards along an input or an output."""
    sides = ("scan_input_directions", "scan_output_directions")
    return any(any(node.attrs.get(side) or ()) for side in sides)


class StepStates:
    """The body of a loop, and which states its values are of.

    Args:
        body: its nodes in the order of evaluation.
        states: those of its inputs that are states, by their places.
        sizes: whether the sizes of a state are of that state.
    """

    def __init__(self, body: gs.Graph, states: Sequence[gs.Tensor], sizes: bool = False) -> None:
        self.body, self.count = body, len(states)
        self._of = {t.name: frozenset((i,)) for i, t in enumerate(states)}
        for node in body.nodes:
            if sizes or node.op not in SIZES_ONLY:
                read = frozenset(chain.from_iterable(map(self.states_of, node.inputs)))
                self._of |= dict.fromkeys((o.name for o in node.outputs), read)

    def states_of(self, tensor: gs.Tensor) -> frozenset[int]:
        """Return the places of the states that a value is computed of."""
        return self._of.get(tensor.name, frozenset())

    def first_nonlinear(self, nodes: Iterable[gs.Node], without: Container[int] = ()) -> str | None:
        """Return the first operator of some nodes that is not linear in states, if any.

        Args:
            nodes: those that are looked at.
            without: places of states that values may depend on in any way.
        """
        needed = {id(node) for node in nodes}
        for node in self.body.nodes:
            taken = [any(i not in without for i in self.states_of(t)) for t in node.inputs]
            looked_at = id(node) in needed and node.op not in SIZES_ONLY
            if looked_at and any(taken) and not is_affine(node.op, taken):
                return str(node.op)
        return None


def nonlinear_operator(loop: gs.Node) -> str | None:
    """Return the first operator by which a Scan or Loop is not linear in its state, if any."""
    after = loop.attrs["body"].outputs[1 if loop.op == "Loop" else 0 :]
    states = _inner_states(loop)
    step = StepStates(loop.attrs["body"], states)
    return step.first_nonlinear(nodes_behind(after[: len(states)]))


def nonlinear_read(loop: gs.Node) -> str | None:
    """Return the first operator by which what a loop gives is not linear in states, if any.

    None of states of one number for each channel: operators of those can leave the loop.
    """
    body, states = loop.attrs["body"], _inner_states(loop)
    matrices = any(len(state.shape or ()) > 2 for state in states)
    return StepStates(body, states).first_nonlinear(body.nodes) if matrices else None


def is_linear_scan(node: gs.Node) -> bool:
    """Return whether a node is a Scan that goes forwards and is linear in its states."""
    return node.op == "Scan" and not has_directions(node) and nonlinear_operator(node) is None


def reads_by_number(loop: gs.Node) -> bool:
    """Return whether steps of a Loop take elements of a tensor outside by a number they count.

    Weights are no such tensors: a loop over layers takes those of its layer.
    """
    if loop.op != "Loop":
        return False
    body: gs.Graph = loop.attrs["body"]
    own = {t.name for t in body.inputs}
    counted = {t.name for t in body.inputs if t.shape is not None and len(t.shape) == 0}
    for node in body.nodes:
        data, places = next(iter(node.inputs), None), node.inputs[1:]
        outside = isinstance(data, gs.Variable) and data.name not in own
        by_number = any(t.name in counted for t in places)
        if node.op in SELECTS and outside and by_number:
            return True
        own |= {t.name for t in node.outputs}
        if any(t.name in counted for t in node.inputs):
            counted |= {t.name for t in node.outputs}
    return False


def _inner_states(loop: gs.Node) -> Sequence[gs.Tensor]:
    """Return the states before a step."""
    inputs = loop.attrs["body"].inputs
    return inputs[2:] if loop.op == "Loop" else inputs[: -loop.attrs["num_scan_inputs"]]


def starts_of(loop: gs.Node) -> list[gs.Tensor]:
    """Return the states before all steps of a Scan or Loop."""
    first = 2 if loop.op == "Loop" else 0
    return list(loop.inputs[first : first + len(_inner_states(loop))])


def reached(read: Mapping[State, Iterable[State]], state: State) -> set[State]:
    """Return the states that one is computed of, by any number of steps.

    Args:
        read: those that each is computed of, by one step.
        state: the one.
    """
    found, pending = set[State](), list(read[state])
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += read[one]
    return found
