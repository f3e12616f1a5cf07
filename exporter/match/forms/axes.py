"""Labelled axes: what an index letter is to an einsum, with a size.

A dimension of a tensor is an ``Index``: a tuple of axes, the last one varying fastest. Reshape
splits and merges indices; a dimension of size 1 is the empty index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from linexport.graph.monomials import ONE, Size, product


class Axis:
    """One label. Two axes are the same only if they are the same object.

    A parameter is a label that is fixed from outside, as the step is within the body of a loop: it
    is neither a dim nor summed over.
    """

    def __init__(self, size: Size, parameter: bool = False) -> None:
        self.size, self.parameter = size, parameter


Index = tuple[Axis, ...]
Renaming = Mapping[Axis, Index]
"""The axis that each becomes, or the several it is split into."""


def fresh(size: Size) -> Index:
    """The index of a new dimension."""
    return () if size == ONE else (Axis(size),)


def renamed(index: Index, renaming: Renaming) -> Index:
    """An index after a renaming; axes it does not mention stay."""
    if not any(a in renaming for a in index):
        return index
    return tuple(b for a in index for b in renaming.get(a, (a,)))


def size_of(index: Index) -> Size:
    """The size of a dimension."""
    return product([a.size for a in index])


def unify(first: Index, second: Index) -> dict[Axis, Index] | None:
    """A renaming under which two indices of equal size become the same, or None.

    Where one has an axis of 32 and the other two of 4 and 8, the one is split.
    """
    renaming: dict[Axis, Index] = {}
    a, b = list(first), list(second)
    while a and b:
        x, y = a.pop(0), b.pop(0)
        if x is y:
            continue
        # Equal sizes, or the last axes of indices of equal size: the same whatever they are called.
        if x.size == y.size or (not a and not b):
            _rename(renaming, y, (x,))
        # x is the larger: its slow part is y, and the rest goes on with what follows y.
        elif rest := x.size.divided(y.size):
            y_rest = Axis(rest)
            _rename(renaming, x, (y, y_rest))
            a.insert(0, y_rest)
        elif rest := y.size.divided(x.size):
            x_rest = Axis(rest)
            _rename(renaming, y, (x, x_rest))
            b.insert(0, x_rest)
        else:
            return None
        # An axis may stand in both indices, or twice: what was renamed is renamed everywhere.
        a, b = (list(renamed(tuple(i), renaming)) for i in (a, b))
    return None if a or b else renaming


def regroup(
    dims: Sequence[Index], target: Sequence[Size]
) -> tuple[list[Index], dict[Axis, Index]] | None:
    """Row-major dims as dims of other sizes, and the splits that takes; None if it is unclear.

    Sizes are compared from both ends. What is left in the middle is one dimension split, or several
    merged: the number of elements is the same, whatever their sizes are called.
    """
    # Row-major order is the order of the axes: a reshape only puts the brackets elsewhere, and cuts
    # an axis where a bracket would fall inside of it.
    axes = [a for index in dims for a in index]
    splits: dict[Axis, Index] = {}
    front, axes, rest = _take(axes, list(target), splits, last=False)
    back, axes, rest = _take(axes, rest, splits, last=True)
    # One size left: all axes left are merged into it.
    if len(rest) == 1:
        middle = [tuple(axes)]
    elif not axes and all(size == ONE for size in rest):
        middle = [() for _ in rest]
    # One axis left: it is split into the sizes left.
    elif len(axes) == 1:
        middle = [fresh(size) for size in rest]
        _rename(splits, axes[0], tuple(a for index in middle for a in index))
    elif not rest and not axes:
        middle = []
    else:
        return None
    return [*front, *middle, *back], splits


def _take(
    axes: list[Axis], target: list[Size], splits: dict[Axis, Index], last: bool
) -> tuple[list[Index], list[Axis], list[Size]]:
    """Fill target sizes with axes from one end, as far as they fit."""
    axes, target = (axes[::-1], target[::-1]) if last else (axes[:], target[:])
    taken: list[Index] = []
    while target:
        index: list[Axis] = []
        pool, made, missing = axes[:], dict[Axis, Index](), target[0]
        while missing != ONE and pool:
            axis = pool.pop(0)
            # The axis fits whole into what is missing of the size.
            if rest := missing.divided(axis.size):
                index.append(axis)
                missing = rest
            # It is larger: a part of it completes the size, the remainder begins the next one. From
            # the front the part is the slow one, from the back the fast one.
            elif rest := axis.size.divided(missing):
                part, remainder = Axis(missing), Axis(rest)
                made[axis] = (remainder, part) if last else (part, remainder)
                index.append(part)
                pool.insert(0, remainder)
                missing = ONE
            else:
                break
        # A size that was not filled leaves nothing behind: its splits are not made.
        if missing != ONE:
            break
        for axis, parts in made.items():
            _rename(splits, axis, parts)
        axes, target = pool, target[1:]
        taken.append(tuple(index[::-1] if last else index))
    return (taken[::-1], axes[::-1], target[::-1]) if last else (taken, axes, target)


def _rename(renaming: dict[Axis, Index], axis: Axis, to: Index) -> None:
    """Add a renaming, also within what other axes are renamed to: one pass then applies all."""
    for known, index in renaming.items():
        renaming[known] = renamed(index, {axis: to})
    renaming[axis] = to
