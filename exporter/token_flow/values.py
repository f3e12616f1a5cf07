"""Abstract values of tensors: their axes, and what their elements are functions of."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from linexport.token_flow.axes import Axis, Span, size_of, spans
from linexport.token_flow.lengths import ONE, Length, of
from linexport.token_flow.masks import NOTHING_KNOWN, Mask, constant

SMALL = 512
"""Elements of tensors whose values are followed."""


class Time(enum.Enum):
    """At which point of the stream a value without an axis of tokens is taken."""

    ALWAYS = "that is the same in every call"
    BEFORE = "from before the call"
    AFTER = "from the end of the call"


@dataclass(frozen=True)
class Affine:
    """Integers that are linear in indices: a number, and a multiple of each axis' index.

    The index of an axis of tokens is the token's place in the stream.
    """

    number: Length
    by: tuple[int, ...]

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """Return the sum, or the difference."""
        by = tuple(a + sign * b for a, b in zip(self.by, other.by, strict=True))
        return Affine(self.number + of(sign) * other.number, by)

    def times(self, factor: int) -> Affine:
        """Return a multiple."""
        return Affine(self.number * of(factor), tuple(factor * n for n in self.by))


@dataclass(frozen=True)
class Tag:
    """Values that a tensor has, wherever it is cut along its tokens.

    Attributes:
        source: what made them.
        groups: for each axis the axes that it has of the source, by their place there; axes of size
            1 have none.
        sizes: of the axes of the source, that of tokens as it is now.
    """

    source: object
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[Length, ...] = field(compare=False)

    @classmethod
    def of(cls, source: object, axes: Sequence[Axis]) -> Tag:
        """Return the tag of a source with these axes."""
        sizes = tuple(size_of(axis) for axis in axes)
        return cls(source, cls.natural(sizes), sizes)

    @staticmethod
    def natural(sizes: Sequence[Length]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of a source itself."""
        return tuple(() if size == ONE else (i,) for i, size in enumerate(sizes))

    def transposed(self, order: Sequence[int]) -> Tag:
        """Return the tag of the tensor with its axes in another order."""
        return replace(self, groups=tuple(self.groups[i] for i in order))

    def regrouped(self, axes: Sequence[Axis]) -> Tag | None:
        """Return the tag of the same elements with other axes; None if one is split."""
        left = [place for group in self.groups for place in group]
        groups = []
        for axis in axes:
            group, size, whole = [], ONE, size_of(axis)
            while left and size != whole:
                group.append(left.pop(0))
                size = size * self.sizes[group[-1]]
            if size != whole:
                return None
            groups.append(tuple(group))
        return None if left else replace(self, groups=tuple(groups))

    def resized(self, axis: int, size: Length) -> Tag | None:
        """Return the tag of the tensor with more or fewer tokens along an axis."""
        group = self.groups[axis] or (len(self.sizes),)
        if len(group) != 1:
            return None
        (place,) = group
        groups = (*self.groups[:axis], group, *self.groups[axis + 1 :])
        sizes = (*self.sizes[:place], size, *self.sizes[place + 1 :])
        return replace(self, groups=groups, sizes=sizes)


@dataclass(frozen=True)
class TokenValue:
    """A tensor as far as it is known.

    Attributes:
        axes: its axes; None where not even their number is known.
        numbers: its elements, each a ``Length`` or a float, where there are few and they are known.
        form: its elements, where they are linear in indices.
        mask: its elements as a function of the distance between its two axes of tokens.
        time: when it is taken, where it has no tokens.
        tokens: whether it depends on the values of tokens, not on their number alone.
        tag: which values it has.
        faults: numbers of the nodes that mix tokens on the way to it.
        states: names of the states it is made of alone.
        running: number of the node that adds up tokens of a call, to which a number is added.
        by_call: whether its elements depend on where a sequence is cut, in a way that its numbers
            and its form do not tell.
    """

    axes: tuple[Axis, ...] | None
    numbers: np.ndarray | None = None
    form: Affine | None = None
    mask: Mask = NOTHING_KNOWN
    time: Time = Time.ALWAYS
    tokens: bool = False
    tag: Tag | None = None
    faults: frozenset[int] = frozenset()
    states: frozenset[str] = frozenset()
    running: int | None = None
    by_call: bool = False

    @property
    def rank(self) -> int:
        """The number of its axes, which are known."""
        return len(self.known_axes)

    @property
    def known_axes(self) -> tuple[Axis, ...]:
        """Its axes.

        Raises:
            MixingError: they are not known.
        """
        if self.axes is None:
            raise MixingError("reads a tensor whose shape is not known")
        return self.axes

    @property
    def spans(self) -> list[Span]:
        """Its factors that are tokens."""
        return spans(self.axes or ())

    @property
    def uniform(self) -> Length | float | None:
        """The one number that all its elements are; None where they are others, or unknown."""
        if self.form is not None and not any(self.form.by):
            return self.form.number
        if self.numbers is None or not self.numbers.size:
            return None
        first: Length | float = self.numbers.flat[0]
        return first if all(n == first for n in self.numbers.flat) else None

    def linear(self) -> Affine | None:
        """Return its elements as linear in indices, if they are."""
        if self.form is not None or self.numbers is None:
            return self.form
        known = [n for n in map(whole, self.numbers.flat) if n is not None]
        if not known or len(known) < self.numbers.size:
            return None
        shape: tuple[int, ...] = self.numbers.shape
        numbers, rank = lengths(known).reshape(shape), len(shape)
        origin = (0,) * rank
        steps = [
            numbers[(*origin[:axis], 1, *origin[axis + 1 :])] - numbers[origin]
            if size > 1
            else of(0)
            for axis, size in enumerate(shape)
        ]
        by = [step.number for step in steps]
        if None in by:
            return None
        found = Affine(numbers[origin], tuple(int(n or 0) for n in by))
        places = np.ndindex(*numbers.shape)
        same = all(numbers[p] == found.number + of(int(np.dot(p, found.by))) for p in places)
        return found if same and len(found.by) == rank else None

    def as_mask(self) -> Mask:
        """Return what is known of it by the distance between its two axes of tokens."""
        number = self.uniform
        if number is not None:
            known = number.number if isinstance(number, Length) else number
            return NOTHING_KNOWN if known is None else constant(known)
        return self.mask

    def without_numbers(self) -> TokenValue:
        """Return the value of which no element is known."""
        found = self.without_form(True)
        return replace(found, numbers=None, mask=NOTHING_KNOWN, tag=None, running=None)

    def without_form(self, lost: bool = False) -> TokenValue:
        """Return the value with its numbers as linear in indices, or without them if they are not.

        Args:
            lost: whether they are not known to be linear any more, either.
        """
        form = None if lost else self.linear()
        numbers = () if self.numbers is None else self.numbers.flat
        symbols = [n.symbols for n in numbers if isinstance(n, Length)]
        symbols += [] if self.form is None else [self.form.number.symbols]
        by_call = self.by_call or (form is None and any(symbols))
        return replace(self, numbers=None, form=form, by_call=by_call)


class MixingError(Exception):
    """Why a node mixes tokens, or may do so.

    Args:
        reason: what it does.
        advice: what would make it stream.
        at: number of the node to blame; None for the one that is followed.
        values: what it gives if tokens may be mixed so; None where that is not known.
    """

    def __init__(
        self,
        reason: str,
        advice: str = "",
        at: int | None = None,
        values: Sequence[TokenValue] | None = None,
    ) -> None:
        super().__init__(reason)
        self.advice, self.at, self.values = advice, at, values


def whole(number: Length | float | None) -> Length | None:
    """Return a number as a length; None of one that is not whole."""
    if isinstance(number, Length) or number is None:
        return number
    return of(int(number)) if np.isfinite(number) and float(number).is_integer() else None


def array(values: Any) -> np.ndarray:
    """Return an object array of numbers, the integers among them as lengths."""
    source = np.asarray(values)
    found = np.empty(source.shape, object)
    whole = source.dtype.kind in "iub"
    for place in np.ndindex(*source.shape):
        number = source[place]
        if isinstance(number, Length):
            found[place] = number
        else:
            found[place] = of(int(number)) if whole else float(number)
    return found


def lengths(values: Sequence[Length]) -> np.ndarray:
    """Return an object array of lengths."""
    found = np.empty(len(values), object)
    for place, value in enumerate(values):
        found[place] = value
    return found
