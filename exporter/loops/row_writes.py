"""Rows that the steps of a Loop write into a tensor, one in each step.

    y[:, n] = row        as ScatterND, ScatterElements, or Where(arange(T) == n, row, y)

Every other row is unchanged by the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import identity_of, producer
from linexport.graph.tensors import known_shape
from linexport.loops.induction import StepNumbers


class RowWrite(NamedTuple):
    """A row, and where a step writes it.

    Attributes:
        row: without the axis it is written along, or with it, of size 1.
        axis: of the tensor that is written to.
        offset: the row is the n + ``offset``-th in step n.
        squeezed: the axis of ``row`` that is of size 1 and no axis of the row, if there is one.
    """

    row: gs.Tensor
    axis: int
    offset: int
    squeezed: int | None


def written_row(numbers: StepNumbers, state: gs.Tensor, after: gs.Tensor) -> RowWrite | None:
    """Return what a step writes to a state, None where it does anything else to it.

    Args:
        numbers: of the steps.
        state: before the step.
        after: the same after it.
    """
    node = producer(_plain(after))
    if node is None or state.shape is None:
        return None
    found = _written(numbers, state, node)
    return found and found._replace(row=_plain(found.row))


def _plain(tensor: gs.Tensor) -> gs.Tensor:
    """Return what a tensor is a copy of."""
    node = producer(tensor)
    same = None if node is None else identity_of(node)
    return tensor if same is None else _plain(same)


def _written(numbers: StepNumbers, state: gs.Tensor, node: gs.Node) -> RowWrite | None:
    """Return what is written by the node that gives a state after the step."""
    if node.op == "Transpose":
        scatter = producer(node.inputs[0], "ScatterND")
        return None if scatter is None else _of_moved(numbers, state, scatter, node)
    if node.op == "ScatterND":
        if node.inputs[0] is not state:
            return None
        return _first_axis(numbers, node, 0) or _second_axis(numbers, state, node)
    if node.op == "ScatterElements":
        return _of_elements(numbers, state, node)
    return _of_choice(numbers, state, node) if node.op == "Where" else None


def _of_moved(
    numbers: StepNumbers, state: gs.Tensor, scatter: gs.Node, back: gs.Node
) -> RowWrite | None:
    """The axis that is written along is moved to the front, and back."""
    moved = producer(scatter.inputs[0], "Transpose")
    if moved is None or moved.inputs[0] is not state:
        return None
    orders = [list(node.attrs.get("perm", ())) for node in (moved, back)]
    # One axis moves to the front, and the others keep their order.
    others = orders[0][1:]
    # The argsort of a permutation is its inverse: the second Transpose undoes the first.
    if not orders[0] or others != sorted(others) or orders[1] != np.argsort(orders[0]).tolist():
        return None
    return _first_axis(numbers, scatter, orders[0][0])


def _first_axis(numbers: StepNumbers, scatter: gs.Node, axis: int) -> RowWrite | None:
    """ScatterND of one index, [[n]]."""
    _, places, row = scatter.inputs
    offset = numbers.offsets.get(places.name)
    # An index of one number is a whole row of the first axis.
    one = places.shape is not None and list(places.shape) == [1, 1]
    if offset is None or not one or _reduces(scatter):
        return None
    return RowWrite(row, axis, offset, 0)


def _second_axis(numbers: StepNumbers, state: gs.Tensor, scatter: gs.Node) -> RowWrite | None:
    """ScatterND of the indices [[0, n], [1, n], ...]."""
    _, places, row = scatter.inputs
    both = producer(places, "Concat")
    if both is None or len(both.inputs) != 2 or len(known_shape(state)) < 2 or _reduces(scatter):
        return None
    first, second = both.inputs
    offset = numbers.offsets.get(second.name)
    whole = first.shape is not None and list(first.shape) == [known_shape(state)[0], 1]
    if offset is None or not whole or not numbers.is_range(first):
        return None
    return RowWrite(row, 1, offset, None)


def _of_elements(numbers: StepNumbers, state: gs.Tensor, scatter: gs.Node) -> RowWrite | None:
    data, places, row = scatter.inputs
    offset = numbers.offsets.get(places.name)
    axis = scatter.attrs.get("axis", 0) % len(known_shape(state))
    if data is not state or offset is None or _reduces(scatter):
        return None
    return RowWrite(row, axis, offset, axis) if _is_row(state, row, axis) else None


def _of_choice(numbers: StepNumbers, state: gs.Tensor, node: gs.Node) -> RowWrite | None:
    """Where(arange(T) == n, row, state)."""
    condition, row, other = node.inputs
    found = _place(numbers, condition, len(known_shape(state)))
    if other is not state or found is None:
        return None
    axis, offset = found
    return RowWrite(row, axis, offset, axis) if _is_row(state, row, axis) else None


def _place(numbers: StepNumbers, condition: gs.Tensor, rank: int) -> tuple[int, int] | None:
    """Return the axis along which one element is true, and by how much its place is not n."""
    shape = condition.shape
    if shape is None or len(shape) > rank:
        return None
    # The condition may vary along one axis alone, where it is true at one place.
    wide = [rank - len(shape) + i for i, size in enumerate(shape) if size != 1]
    node = producer(condition)
    while node is not None and node.op in ("Expand", "Identity", "Reshape", "Unsqueeze"):
        node = producer(node.inputs[0])
    if node is None or node.op != "Equal" or len(wide) != 1:
        return None
    for places, number in (node.inputs, node.inputs[::-1]):
        offset = numbers.offsets.get(number.name)
        if offset is not None and numbers.is_range(places):
            return wide[0], offset
    return None


def _is_row(state: gs.Tensor, row: gs.Tensor, axis: int) -> bool:
    """Return whether a tensor has the shape of a state, with size 1 along an axis."""
    shape = list(known_shape(state))
    shape[axis] = 1
    return row.shape is not None and list(row.shape) == shape


def _reduces(scatter: gs.Node) -> bool:
    return scatter.attrs.get("reduction", "none") != "none"
