"""Axes of tensors: which index is which token.

    x (B, T, C)                       element i of axis 1 is token PAST + i
    Concat(past (B, r, C), x)         element i of axis 1 is token PAST - r + i
    Reshape(x, (B, T/64, 64, C))      element (c, j) of axes 1 and 2 is token PAST + 64 c + j

An axis is a tuple of factors, the last of which varies fastest: one that merges batch and tokens
has both. An axis of size 1 is the empty tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from linexport.token_flow.lengths import ONE, Length, of, product


@dataclass(frozen=True)
class Fixed:
    """A factor whose indices are no tokens, or those inside of a chunk.

    Attributes:
        size: number of its elements.
        step: tokens from one element to the next, inside of a chunk; 0 of no tokens.
        aligned: whether a token is always at the same place of its chunk.
    """

    size: Length
    step: int = 0
    aligned: bool = True


@dataclass(frozen=True)
class Span:
    """A factor whose elements are tokens of the stream: ``start`` and every ``step``-th after it.

    Attributes:
        start, stop: the first token, and the one behind the last.
        step: tokens from one element to the next.
        aligned: whether chunks begin at the same tokens however a sequence is cut.
        real: the first token whose element is what it is in the whole sequence: those before it
            were filled in, as by zeros in front of a piece.
        filled_by: number of the node that did so.
        moved_by: number of the last node that gave elements to other tokens, or cut some off.
        rows: rows of past tokens that are there by a state; None for all.
        extra: elements behind the tokens that are none, as of a key that is not a token.
    """

    start: Length
    stop: Length
    step: int = 1
    aligned: bool = True
    real: Length | None = None
    filled_by: int | None = None
    moved_by: int | None = None
    rows: int | None = 0
    extra: int = 0

    @property
    def size(self) -> Length:
        """Number of its elements."""
        return (self.stop - self.start) // of(self.step) + of(self.extra)

    @property
    def place(self) -> tuple[Length, Length, int, bool, int]:
        """Where it is in the stream."""
        return self.start, self.stop, self.step, self.aligned, self.extra

    def shifted(self, by: Length) -> Span:
        """Return the same elements called by other tokens."""
        real = None if self.real is None else self.real + by
        return replace(self, start=self.start + by, stop=self.stop + by, real=real)

    def cut(self, start: Length, stop: Length, by: int) -> Span:
        """Return a part of it; what was filled in may be cut off.

        Args:
            start: the first token.
            stop: the token behind the last.
            by: number of the node that cuts.
        """
        real, filled_by = self.real, self.filled_by
        if real is not None and (start - real).is_at_least_zero:
            real, filled_by = None, None
        return replace(self, start=start, stop=stop, real=real, filled_by=filled_by, moved_by=by)

    @property
    def valid_from(self) -> Length:
        """The first token whose element is what it is in the whole sequence."""
        return self.start if self.real is None else self.real


Factor = Fixed | Span
Axis = tuple[Factor, ...]


def fixed(size: Length) -> Axis:
    """Return an axis without tokens."""
    return () if size == ONE else (Fixed(size),)


def size_of(axis: Axis) -> Length:
    """Return the size of an axis."""
    return product(factor.size for factor in axis)


def spans(axes: Iterable[Axis]) -> list[Span]:
    """Return the factors that are tokens."""
    return [factor for axis in axes for factor in axis if isinstance(factor, Span)]


def span_of(axis: Axis) -> Span | None:
    """Return the tokens of an axis that has nothing else; None of any other."""
    return axis[0] if len(axis) == 1 and isinstance(axis[0], Span) else None


def has_tokens(axis: Axis) -> bool:
    """Return whether any factor of an axis is tokens."""
    return any(isinstance(factor, Span) for factor in axis)


def regroup(axes: Sequence[Axis], sizes: Sequence[Length]) -> list[Axis] | None:
    """Return axes in row-major order as axes of other sizes; None where that is unclear.

    Sizes are compared from both ends. What is left in the middle is several factors merged, or one
    without tokens split.
    """
    factors = [factor for axis in axes for factor in axis]
    front, factors, sizes = _take(factors, list(sizes), last=False)
    back, factors, sizes = _take(factors, sizes, last=True)
    if len(sizes) == 1:
        middle = [_merged(factors)]
    elif len(factors) == 1 and isinstance(factors[0], Fixed) and not factors[0].step and sizes:
        middle = [fixed(size) for size in sizes]
    elif not factors and all(size == ONE for size in sizes):
        middle = [() for _ in sizes]
    else:
        return None
    return [*front, *middle, *back]


def _take(
    factors: list[Factor], sizes: list[Length], last: bool
) -> tuple[list[Axis], list[Factor], list[Length]]:
    """Fill sizes with factors from one end, as far as they fit."""
    taken: list[Axis] = []
    place = -1 if last else 0
    while sizes:
        own, left, missing = list[Factor](), list(factors), sizes[place]
        while missing != ONE and left:
            factor = left.pop(place)
            rest = missing.divided(factor.size)
            if rest is not None:
                own.append(factor)
                missing = rest
                continue
            split = _split(factor, missing, last)
            if split is None:
                break
            first, second = split
            own.append(second if last else first)
            left.insert(len(left) if last else 0, first if last else second)
            missing = ONE
        if missing != ONE:
            break
        taken.append(_merged(own[::-1] if last else own))
        factors = left
        sizes.pop(place)
    return (taken[::-1] if last else taken), factors, sizes


def _split(factor: Factor, size: Length, last: bool) -> tuple[Factor, Factor] | None:
    """Return a factor as two, of which the first, or the last, has a size."""
    if isinstance(factor, Span) and factor.extra:
        return None
    rest = factor.size.divided(size)
    if rest is None:
        return None
    outer, inner = (rest, size) if last else (size, rest)
    if isinstance(factor, Fixed) and not factor.step:
        return Fixed(outer), Fixed(inner)
    if inner.number is None:
        return None
    step = factor.step * inner.number
    if isinstance(factor, Fixed):
        return replace(factor, size=outer, step=step), replace(factor, size=inner)
    chunk = of(step)
    whole = all(end.divided(chunk) is not None for end in (factor.start, factor.stop))
    aligned = factor.aligned and whole
    return replace(factor, step=step, aligned=aligned), Fixed(inner, factor.step, aligned)


def _follows(before: Factor | None, factor: Factor) -> bool:
    """Return whether a factor is what is inside of the one before it."""
    return before is not None and before.step == factor.step * (factor.size.number or 0)


def _merged(factors: Sequence[Factor]) -> Axis:
    """Return factors as one axis, chunks and what is inside of them put together."""
    found: list[Factor] = []
    for factor in factors:
        before = found[-1] if found else None
        inside = isinstance(factor, Fixed) and before is not None
        if inside and not factor.step and isinstance(before, Fixed) and not before.step:
            found[-1] = Fixed(before.size * factor.size)
        elif (
            inside
            and before is not None
            and factor.step
            and before.step == factor.step * (factor.size.number or 0)
        ):
            own: dict[str, Any] = {"step": factor.step}
            if isinstance(before, Fixed):
                own["size"] = before.size * factor.size
            found[-1] = replace(found[-1], **own)
        else:
            found.append(factor)
    return tuple(found)
