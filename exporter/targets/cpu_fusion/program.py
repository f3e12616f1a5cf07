"""Programs of the CPU library's ``Tokenwise``: places in a token's memories, and instructions.

A place is a memory, its first element and a step for every axis: slices, reshapes and broadcast
axes are places, and move nothing. The library reads a program as text, ``plugins/cpu/cpp/
tokenwise.cc``:

    inputs, and of each its floats for a token; 0 and its floats where all tokens share it
    outputs, and of each its axes behind those of batch and token
    constants and the bits of their values
    floats of room for what is computed meanwhile
    instructions: name, four sizes, and places of the result and of what it reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from linexport.graph.dims import StaticShape

AXES = 4
"""Axes that an instruction has."""

ALIGNED = 16
"""Floats that what is computed begins at a multiple of."""


class UnfitError(Exception):
    """A program that the library has no form for; the message says why."""


@dataclass(frozen=True)
class TensorView:
    """A tensor of one token.

    Attributes:
        memory: its kind ("input", "output", "constant" or "room") and number.
        offset: its first element.
        shape: its axes behind those of batch and token.
        steps: elements from one to the next, along each.
    """

    memory: tuple[str, int]
    offset: int
    shape: StaticShape
    steps: StaticShape

    @property
    def is_packed(self) -> bool:
        """True if its elements lie one behind the other."""
        return all(
            step == expected or size == 1
            for size, step, expected in zip(self.shape, self.steps, packed(self.shape), strict=True)
        )

    def reshaped(self, shape: StaticShape) -> TensorView:
        """Return a packed place with other axes."""
        return replace(self, shape=shape, steps=packed(shape))

    def part(self, axis: int, start: int, size: int) -> TensorView:
        """Return the elements from ``start`` on along one axis."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return replace(self, offset=self.offset + start * self.steps[axis], shape=shape)

    def broadcast(self, shape: StaticShape) -> TensorView:
        """Return the place with the axes of ``shape``, as operators broadcast."""
        missing = len(shape) - len(self.shape)
        pairs = zip(self.shape, self.steps, strict=True)
        steps = (*(0,) * missing, *(0 if size == 1 else step for size, step in pairs))
        return replace(self, shape=shape, steps=steps)


def packed(shape: StaticShape) -> StaticShape:
    """Return the steps of axes whose elements lie one behind the other."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class Instruction:
    """One loop over the elements of a result, or for a sum over those of its source."""

    name: str
    sizes: StaticShape
    places: tuple[tuple[tuple[str, int], int, StaticShape], ...]


@dataclass
class Program:
    """A program as it is written.

    Attributes:
        inputs: floats of a token and 0, or 0 and the floats that all share.
        outputs: axes.
        constants: values.
        rooms: floats of each value that is computed meanwhile.
        instructions: in order.
    """

    inputs: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[StaticShape] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)

    def input(self, shape: StaticShape, shared: bool) -> TensorView:
        """Add an input of every token, or one that all share."""
        self.inputs.append((0, prod(shape)) if shared else (prod(shape), 0))
        return TensorView(("input", len(self.inputs) - 1), 0, shape, packed(shape))

    def output(self, shape: StaticShape) -> TensorView:
        """Add an output."""
        self.outputs.append(shape)
        return TensorView(("output", len(self.outputs) - 1), 0, shape, packed(shape))

    def constant(self, value: float) -> TensorView:
        """Add a number."""
        self.constants.append(value)
        return TensorView(("constant", 0), len(self.constants) - 1, (), ())

    def room(self, shape: StaticShape) -> TensorView:
        """Return a place for what is computed meanwhile."""
        self.rooms.append(prod(shape))
        return TensorView(("room", len(self.rooms) - 1), 0, shape, packed(shape))

    def add(
        self, name: str, to: TensorView, sources: Sequence[TensorView], over: StaticShape
    ) -> None:
        """Add an instruction over the axes ``over``, of which ``to`` lacks those summed over.

        Raises:
            UnfitError: it has too many axes.
        """
        places = [to.broadcast(over), *(source.broadcast(over) for source in sources)]
        sizes, steps = _merged(over, [place.steps for place in places])
        own = tuple(
            (place.memory, place.offset, step) for place, step in zip(places, steps, strict=True)
        )
        self.instructions.append(Instruction(name, sizes, own))

    def text(self) -> str:
        """Return the program as the library reads it."""
        offsets, floats = self._rooms()
        first = {"input": 0, "output": len(self.inputs)}
        first["constant"] = first["room"] = first["output"] + len(self.outputs)
        first["room"] += 1
        words: list[object] = [len(self.inputs)]
        for width, shared in self.inputs:
            words += [width] if width else [0, shared]
        words.append(len(self.outputs))
        for shape in self.outputs:
            words += [len(shape), *shape]
        words += [len(self.constants), *map(_bits, self.constants), floats]
        words.append(len(self.instructions))
        for one in self.instructions:
            words += [one.name, *one.sizes]
            for (kind, number), offset, steps in one.places:
                within = offsets[number] if kind == "room" else 0
                memory = first[kind] + (0 if kind == "room" else number)
                words += [memory, offset + within, *steps]
        return " ".join(map(str, words))

    def _rooms(self) -> tuple[list[int], int]:
        """Return where each value of the room begins, and its floats: places serve again."""
        last = {
            number: at
            for at, one in enumerate(self.instructions)
            for (kind, number), _, _ in one.places
            if kind == "room"
        }
        offsets, floats, free = [0] * len(self.rooms), 0, dict[int, list[int]]()
        placed: set[int] = set()
        for at, one in enumerate(self.instructions):
            numbers = {number for (kind, number), _, _ in one.places if kind == "room"}
            for number in sorted(numbers - placed):
                size = -(-self.rooms[number] // ALIGNED) * ALIGNED
                if free.get(size):
                    offsets[number] = free[size].pop()
                else:
                    offsets[number], floats = floats, floats + size
                placed.add(number)
            for number in sorted(n for n in numbers if last[n] == at):
                size = -(-self.rooms[number] // ALIGNED) * ALIGNED
                free.setdefault(size, []).append(offsets[number])
        return offsets, floats


def _bits(value: float) -> int:
    """Return the bits of a float32: text of it would depend on who reads it."""
    return int(np.float32(value).view(np.uint32))


def _merged(
    sizes: StaticShape, steps: Sequence[StaticShape]
) -> tuple[StaticShape, list[StaticShape]]:
    """Return loops over AXES axes: neighbours that every place walks as one are one.

    Raises:
        UnfitError: there are more.
    """
    axes = [[size, *own] for size, *own in zip(sizes, *steps, strict=True) if size != 1]
    merged: list[list[int]] = []
    for axis in axes:
        if merged and all(
            outer == inner * axis[0] for outer, inner in zip(merged[-1][1:], axis[1:], strict=True)
        ):
            merged[-1] = [merged[-1][0] * axis[0], *axis[1:]]
        else:
            merged.append(axis)
    # The library's inner loop is over elements one behind the other.
    if not merged or merged[-1][1] > 1 or any(step > 1 for step in merged[-1][2:]):
        merged.append([1, 1, *(0 for _ in steps[1:])])
    if len(merged) > AXES:
        raise UnfitError(f"an instruction over {len(merged)} axes")
    merged = [[1, *(0 for _ in steps)]] * (AXES - len(merged)) + merged
    return tuple(axis[0] for axis in merged), [
        tuple(axis[place + 1] for axis in merged) for place in range(len(steps))
    ]
