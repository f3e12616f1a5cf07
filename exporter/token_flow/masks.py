"""Values of pairs of tokens as functions of the distance between the two, where it decides them.

    [s <= t] [t - s < 3] exp(q_t k_s)      is      any value where t - s is 0, 1 or 2, else 0

A function is linear between two cuts, or ``ANY``: |t - s| is t - s from 0 on, and s - t before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

EXCLUDED = -1e4
"""Scores of at most this have no part in a softmax, and stay so whatever is added."""


@dataclass(frozen=True)
class LinearStep:
    """offset + slope * distance."""

    offset: float
    slope: float = 0.0

    def at(self, distance: float) -> float:
        """Return the value at a distance."""
        return self.offset + self.slope * distance

    @property
    def number(self) -> float | None:
        """The value, if it is the same at every distance."""
        return None if self.slope else self.offset


Step = LinearStep | None
ANY: Step = None
"""A value that the distance does not decide."""


@dataclass(frozen=True)
class Mask:
    """A function of the distance from the second of two axes of tokens to the first.

    Attributes:
        cuts: distances at which the function changes, in order.
        steps: functions: before the first cut, from each cut to before the next.
    """

    cuts: tuple[int, ...] = ()
    steps: tuple[Step, ...] = (ANY,)

    def at(self, distance: int) -> Step:
        """Return the function at a distance."""
        return self.steps[sum(cut <= distance for cut in self.cuts)]

    def turned(self) -> Mask:
        """Return the function of the distance from the first axis to the second."""
        steps = [s and LinearStep(s.offset, -s.slope) for s in reversed(self.steps)]
        return Mask(tuple(1 - cut for cut in reversed(self.cuts)), tuple(steps))

    def shifted(self, by: int) -> Mask:
        """Return the function with distances that are larger by a number."""
        steps = [s and LinearStep(s.at(-by), s.slope) for s in self.steps]
        return Mask(tuple(cut + by for cut in self.cuts), tuple(steps))

    def within(self, neutral: Callable[[float], bool]) -> tuple[float, float] | None:
        """Return the least and largest distance of values that are not neutral; None without."""
        ends = [-math.inf, *self.cuts, math.inf]
        found = [
            (ends[i], ends[i + 1] - 1)
            for i, step in enumerate(self.steps)
            if step is None or step.number is None or not neutral(step.number)
        ]
        return (found[0][0], found[-1][1]) if found else None


NOTHING_KNOWN = Mask()


def constant(value: float) -> Mask:
    """Return the function that is the same everywhere."""
    return Mask((), (LinearStep(float(value)),))


def linear(slope: float, offset: float) -> Mask:
    """Return a multiple of the distance plus a number."""
    return Mask((), (LinearStep(float(offset), float(slope)),))


def combined(operator: str, masks: Sequence[Mask]) -> Mask:
    """Return what an operator makes of values of the same pairs."""
    cuts = sorted({cut for mask in masks for cut in mask.cuts})
    inner = [cut for d in _between(cuts) for cut in _crossings(operator, [m.at(d) for m in masks])]
    cuts = sorted({*cuts, *inner})
    steps = [_applied(operator, [mask.at(d) for mask in masks], d) for d in _between(cuts)]
    kept = [i for i in range(len(cuts)) if steps[i] != steps[i + 1]]
    return Mask(tuple(cuts[i] for i in kept), (steps[0], *(steps[i + 1] for i in kept)))


def _between(cuts: Sequence[int]) -> Iterator[int]:
    """Yield one distance before the first cut, and each cut."""
    yield cuts[0] - 1 if cuts else 0
    yield from cuts


def _crossings(operator: str, steps: Sequence[Step]) -> Iterator[int]:
    """Yield distances from which on another function may be the larger, or have another sign."""
    if operator not in ORDERS:
        return
    lines = [step for step in steps if step is not None]
    lines += [LinearStep(0.0)] * (len(lines) == 1)
    for i, first in enumerate(lines):
        for second in lines[:i]:
            if first.slope != second.slope:
                meet = (second.offset - first.offset) / (first.slope - second.slope)
                if math.isfinite(meet):
                    yield from (math.floor(meet), math.floor(meet) + 1)


def _applied(operator: str, steps: list[Step], distance: int) -> Step:
    """Return what an operator makes of functions, from a distance to the next cut."""
    known = [step for step in steps if step is not None]
    numbers = [step.number for step in known]
    least = min((n for n in numbers if n is not None), default=math.inf)
    match operator:
        case "Identity" | "Cast" | "CastLike":
            return steps[0]
        case "Mul" | "And" if 0.0 in numbers:
            return LinearStep(0.0)
        case "Div" if steps[0] == LinearStep(0.0):
            return steps[0]
        case "Or" if any(numbers):
            return LinearStep(1.0)
        case "Where" if steps[0] is not None:
            return steps[1] if steps[0].at(distance) else steps[2]
        case "Where" if steps[1] == steps[2]:
            return steps[1]
        # A score that is excluded stays so whatever is added to it, or taken off.
        case "Add" | "Sum" if least <= EXCLUDED:
            return LinearStep(least)
        case "Sub" if steps[1] is None and least <= EXCLUDED:
            return steps[0]
        case "Softmax":
            return LinearStep(0.0) if least <= EXCLUDED else ANY
        case "LogSoftmax":
            return LinearStep(least) if least <= EXCLUDED else ANY
    return ANY if len(known) < len(steps) else _of_lines(operator, known, distance)


def _of_lines(operator: str, lines: Sequence[LinearStep], distance: int) -> Step:
    """Return what an operator makes of functions that are all known."""
    if operator in ORDERS and operator not in COMPARISONS:
        return _ordered(operator, lines, distance)
    if operator in LINEAR:
        return _linear(operator, lines)
    values = [line.at(distance) for line in lines]
    return _of_numbers(operator, values, [line.number for line in lines])


def _ordered(operator: str, lines: Sequence[LinearStep], distance: int) -> Step:
    """Return which of some functions an operator takes: up to the next cut none crosses another."""
    values = [line.at(distance) for line in lines]
    match operator:
        case "Abs" | "Relu" if values[0] >= 0:
            return lines[0]
        case "Abs":
            return LinearStep(-lines[0].offset, -lines[0].slope)
        case "Relu":
            return LinearStep(0.0)
        case "Clip":
            # The middle one of lower bound, value and upper bound.
            return lines[values.index(sorted(values)[1])] if len(values) == 3 else ANY
    return lines[values.index((max if operator == "Max" else min)(values))]


def _linear(operator: str, lines: Sequence[LinearStep]) -> Step:
    first, second = lines[0], lines[-1]
    match operator:
        case "Neg":
            return LinearStep(-first.offset, -first.slope)
        case "Add" | "Sum":
            return LinearStep(sum(x.offset for x in lines), sum(x.slope for x in lines))
        case "Sub":
            return LinearStep(first.offset - second.offset, first.slope - second.slope)
        case "Mul" if first.number is not None:
            return LinearStep(first.offset * second.offset, first.offset * second.slope)
        case "Mul" | "Div" if second.number:
            by = second.offset if operator == "Mul" else 1 / second.offset
            return LinearStep(first.offset * by, first.slope * by)
    return ANY


def _of_numbers(operator: str, values: Sequence[float], numbers: Sequence[float | None]) -> Step:
    if operator not in FUNCTIONS or (None in numbers and operator not in COMPARISONS):
        return ANY
    try:
        return LinearStep(float(FUNCTIONS[operator](*values)))
    except (ArithmeticError, ValueError):
        return ANY


LINEAR = ("Add", "Sum", "Sub", "Neg", "Mul", "Div")
COMPARISONS: dict[str, Callable[..., float]] = {
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Sign": lambda a: (a > 0) - (a < 0),
}
ORDERS = ("Max", "Min", "Clip", "Abs", "Relu", *COMPARISONS)
"""Operators that change where one function begins to be larger than another, or than zero."""

FUNCTIONS: dict[str, Callable[..., float]] = {
    **COMPARISONS,
    "Exp": math.exp,
    "Log": lambda a: math.log(a) if a else -math.inf,
    "Tanh": math.tanh,
    "Sqrt": math.sqrt,
    "Not": lambda a: not a,
    "And": lambda a, b: bool(a) and bool(b),
    "Or": lambda a, b: bool(a) or bool(b),
    "Xor": lambda a, b: bool(a) != bool(b),
    "IsNaN": math.isnan,
    "IsInf": math.isinf,
    "Pow": lambda a, b: a**b,
    "Reciprocal": lambda a: 1 / a,
}
"""Operators that act on each entry, of numbers."""
