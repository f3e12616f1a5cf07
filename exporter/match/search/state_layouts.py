"""Dims of a state of an operator, in the orders in which a graph may have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from linexport.graph.monomials import Size
from linexport.match.forms.axes import Axis, Index, size_of


def orders(dims: Sequence[Index], sizes: Sequence[Size]) -> Iterator[list[Index]]:
    """Yield dims of these sizes, made of all labels of others, in each order that gives them."""
    labels = [axis for index in dims for axis in index]
    for order in permutations(labels):
        groups = _grouped(order, sizes)
        if groups is not None:
            yield groups


def _grouped(order: Iterable[Axis], sizes: Sequence[Size]) -> list[Index] | None:
    """Return labels in their order as dims of these sizes; None where that cannot be."""
    left, groups = list(order), list[Index]()
    for size in sizes:
        group: Index = ()
        while size_of(group) != size and left:
            group = (*group, left.pop(0))
        if size_of(group) != size:
            return None
        groups.append(group)
    return None if left else groups
