"""States of sessions, stacked so that a call of the model reads and writes them where they are.

    past     rows a ... b of one side      one row a session, consecutive for those of a call
    present  rows a ... b of the other     written there by the runtime; the sides are then swapped

On a GPU the sides are in its memory, and the states that grow; the tokens counted in the host's.

A state of fixed size is copied only when the sessions of a call change: those that are elsewhere
trade rows. A state that grows is another array after each call; it is kept stacked, padding
included, while the same sessions share the calls, and split when they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.model import Model
from linexport.serving.layout import Layout


@dataclass(eq=False)
class Block:
    """Arrays that are not rows of the store, as the last call of some sessions left them.

    Attributes:
        arrays: stacked by session.
        lengths: of each session: rows of a state that grows, padding excluded.
    """

    arrays: Arrays
    lengths: list[int]


@dataclass(eq=False)
class Place:
    """Where the state of a session is.

    Attributes:
        row: of both sides; None before its first call.
        side: that holds the state.
        block: the rest of the state.
        index: of the session in the block.
        value: the whole state, before the first call.
    """

    value: Arrays = field(default_factory=dict)
    row: int | None = None
    side: int = 0
    block: Block | None = None
    index: int = 0


@dataclass(frozen=True)
class Stack:
    """States for a call.

    Attributes:
        places: of the sessions, in the order of the rows.
        past: all states.
        into: arrays for the next states, as far as these have a fixed size.
    """

    places: list[Place]
    past: Arrays
    into: Arrays


class Store:
    """States of up to ``slots`` sessions; not safe for threads by itself."""

    def __init__(self, model: Model, layout: Layout, slots: int) -> None:
        self._model, self._layout = model, layout
        begin = model.initial_state(1)
        fixed = [n for n, s in model.states.items() if layout.is_row(n)]
        shapes = {n: (slots, *begin[n].shape[1:]) for n in fixed}
        self._begin = begin
        self._sides: list[Arrays] = [
            {n: model.empty(shapes[n], begin[n].dtype) for n in fixed} for _ in range(2)
        ]
        self._owners: list[Place | None] = [None] * slots

    def place(self, value: Arrays) -> Place:
        """Return a new place with a state; an empty one begins a sequence."""
        return Place(value)

    def drop(self, place: Place) -> None:
        """Free the row of a place that is not used any more."""
        if place.row is not None:
            self._owners[place.row] = None
        place.row = place.block = None

    def read(self, place: Place) -> Arrays:
        """Return a copy of a state."""
        if place.row is None:
            return place.value
        rows = slice(place.row, place.row + 1)
        fixed = {n: np.array(v[rows]) for n, v in self._sides[place.side].items()}
        rest = {n: np.array(v) for n, v in self._rest(place).items()}
        return {n: {**fixed, **rest}[n] for n in self._begin}

    def lengths(self, place: Place) -> Arrays:
        """Return the part of a state by which sessions join calls."""
        return (place.value or self._begin) if place.row is None else self._rest(place)

    def gather(self, places: Sequence[Place]) -> Stack:
        """Bring sessions into consecutive rows of one side, and return them in that order."""
        for place in places:
            if place.row is None:
                self._settle(place)
        start, side = self._window(places)
        self._collect(places, start, side)
        ordered = sorted(places, key=lambda p: p.row or 0)
        rows = slice(start, start + len(places))
        past = {n: v[rows] for n, v in self._sides[side].items()}
        into = {n: v[rows] for n, v in self._sides[1 - side].items()}
        return Stack(ordered, {**past, **self._stacked(ordered)}, into)

    def commit(self, stack: Stack, rest: Arrays, tokens: int, kept: Sequence[bool]) -> None:
        """Make the states that a call wrote those of its sessions, where these are kept."""
        before = [p.block.lengths[p.index] if p.block else 0 for p in stack.places]
        block = Block(rest, [length + tokens for length in before])
        for index, (place, keep) in enumerate(zip(stack.places, kept, strict=True)):
            if keep:
                place.side, place.block, place.index = 1 - place.side, block, index

    def _settle(self, place: Place) -> None:
        """Give a session a row, and its state to it."""
        value = place.value or self._begin
        place.row, place.side = self._owners.index(None), 0
        self._owners[place.row] = place
        for name, values in self._sides[0].items():
            values[place.row] = value[name][0]
        rest = {n: v for n, v in value.items() if not self._layout.is_row(n)}
        rest |= self._model.hold({n: v for n, v in rest.items() if self._layout.grows(n)})
        place.block, place.index, place.value = Block(rest, [self._layout.rows(rest)]), 0, {}

    def _window(self, places: Sequence[Place]) -> tuple[int, int]:
        """Return the first row and the side of the rows that hold most of them already."""
        count = len(places)
        held = [(p.row or 0, p.side) for p in places]

        def missing(window: tuple[int, int]) -> int:
            start, side = window
            return sum(not (start <= row < start + count and s == side) for row, s in held)

        windows = [(a, s) for a in range(len(self._owners) - count + 1) for s in range(2)]
        return min(windows, key=missing)

    def _collect(self, places: Sequence[Place], start: int, side: int) -> None:
        rows = range(start, start + len(places))
        members = {id(p) for p in places}
        free = [r for r in rows if id(self._owners[r]) not in members]
        for place in places:
            if place.row is None or place.row not in rows:
                self._move(place, free.pop(), side)
            elif place.side != side:
                self._write(place.row, side, self._row(place))
                place.side = side

    def _move(self, place: Place, row: int, side: int) -> None:
        """Put a session into a row; who was there gets the row that it leaves."""
        left, other = place.row, self._owners[row]
        assert left is not None
        displaced = None if other is None else {n: v.copy() for n, v in self._row(other).items()}
        self._write(row, side, self._row(place))
        self._owners[row], self._owners[left] = place, other
        place.row, place.side = row, side
        if other is not None and displaced is not None:
            other.row = left
            self._write(left, other.side, displaced)

    def _row(self, place: Place) -> Arrays:
        return {n: v[place.row] for n, v in self._sides[place.side].items()}

    def _write(self, row: int, side: int, values: Arrays) -> None:
        for name, stack in self._sides[side].items():
            stack[row] = values[name]

    def _rest(self, place: Place) -> Arrays:
        """Return what is not in rows, without padding."""
        assert place.block is not None
        return self._layout.own(place.block.arrays, place.index, place.block.lengths[place.index])

    def _stacked(self, places: Sequence[Place]) -> Arrays:
        """Return states that are not in rows, stacked: as they are, or split and stacked anew."""
        first: Any = places[0].block
        if not first.arrays:
            return {}
        same = all(p.block is first and p.index == i for i, p in enumerate(places))
        if same and len(first.lengths) == len(places):
            arrays: Arrays = first.arrays
            return arrays
        parts = [self._rest(p) for p in places]
        taken = {id(p.block) for p in places}
        for other in self._owners:
            if other is not None and id(other.block) in taken and other not in places:
                rest = {n: v.copy() for n, v in self._rest(other).items()}
                other.block, other.index = Block(rest, [self._layout.rows(rest)]), 0
        return self._layout.stack_rest(parts)
