"""Loops over tokens: whether the state after a token is linear in the state before it.

S_t = F_t(S_{t-1}) + b_t        F_t: sums, products with values that are not states, moves
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
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


def nonlinear_operator(loop: gs.Node) -> str | None:
    """Return the first operator by which a Scan or Loop is not linear in its state, if any."""
    count = _states(loop)
    after = loop.attrs["body"].outputs[_control(loop) :]
    body: gs.Graph = loop.attrs["body"]
    return first_nonlinear(body, _names(loop), nodes_behind(after[:count]))


def nonlinear_read(loop: gs.Node) -> str | None:
    """Return the first operator by which what a loop gives is not linear in states, if any.

    None of states of one number for each channel: operators of those can leave the loop.
    """
    body: gs.Graph = loop.attrs["body"]
    states = body.inputs[2:] if loop.op == "Loop" else body.inputs[: _states(loop)]
    matrices = any(len(state.shape or ()) > 2 for state in states)
    return first_nonlinear(body, _names(loop), body.nodes) if matrices else None


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


def _control(loop: gs.Node) -> int:
    """Return how many outputs of a body say whether the loop goes on."""
    return 1 if loop.op == "Loop" else 0


def _states(loop: gs.Node) -> int:
    return len(loop.inputs) - (2 if loop.op == "Loop" else loop.attrs["num_scan_inputs"])


def starts_of(loop: gs.Node) -> list[gs.Tensor]:
    """Return the states before all steps of a Scan or Loop."""
    first = 2 if loop.op == "Loop" else 0
    return list(loop.inputs[first : first + _states(loop)])


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


def _names(loop: gs.Node) -> set[str]:
    """Return the names that the states before a step have in it."""
    body: gs.Graph = loop.attrs["body"]
    before = body.inputs[2:] if loop.op == "Loop" else body.inputs
    return {tensor.name for tensor in before[: _states(loop)]}


def first_nonlinear(body: gs.Graph, states: set[str], nodes: Iterable[gs.Node]) -> str | None:
    """Return the first operator of some nodes of a body that is not linear in states, if any.

    Args:
        body: its nodes in the order of evaluation.
        states: names of its inputs, or of other values that are linear in states.
        nodes: those that are looked at.
    """
    needed, linear = {id(node) for node in nodes}, set(states)
    for node in body.nodes:
        taken = [tensor.name in linear for tensor in node.inputs]
        if id(node) not in needed or not any(taken) or node.op in SIZES_ONLY:
            continue
        if not is_affine(node.op, taken):
            return str(node.op)
        linear |= {tensor.name for tensor in node.outputs}
    return None
