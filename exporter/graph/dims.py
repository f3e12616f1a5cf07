"""Dynamic dimensions by name, and the user's ranges for them: ``seq=1:1024:8192``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from linexport.errors import UsageError

Shape = Sequence[int | str]
"""Sizes by axis: numbers, and symbols of dynamic sizes ("" for one without a name)."""

StaticShape = tuple[int, ...]
"""Sizes by axis, all of them numbers."""

PAST = "past"
"""The dimension of rows of keys and values that earlier calls left."""

DIVIDED = 64 * 45045
"""A number of tokens that all usual chunks divide."""

MULTIPLE = re.compile(r"(?P<number>\d+)\*(?P<root>.+)")


@dataclass(frozen=True)
class DimRange:
    """Sizes a named dimension may take: at least ``min``, usually ``opt``, at most ``max``.

    ``max`` is None where nothing bounds it. ``batch`` tells the dimension that independent samples
    are stacked along from those of sequences, whatever they are called. Every size is a multiple
    of ``multiple``, as are ``min`` and ``max``.
    """

    min: int = 1
    opt: int | None = None
    max: int | None = None
    batch: bool = False
    multiple: int = 1

    def allows(self, size: int) -> bool:
        """Return whether ``size`` is one that the dimension may take."""
        within = self.min <= size and (self.max is None or size <= self.max)
        return within and size % self.multiple == 0

    def rounded(self, size: int) -> int:
        """Return the next multiple from ``size`` on."""
        return -(-size // self.multiple) * self.multiple

    @property
    def steps(self) -> str:
        """Text for people on which sizes of the range are allowed; "" where all are."""
        return f"multiples of {self.multiple}" if self.multiple > 1 else ""

    def times(self, number: int) -> DimRange:
        """Return the range of sizes so many times as large."""
        opt, most = (None if n is None else number * n for n in (self.opt, self.max))
        return DimRange(number * self.min, opt, most, self.batch, number * self.multiple)

    def nearest(self, size: int) -> int:
        """Return the next allowed size from ``size`` on, or the end of the range it lies beyond."""
        size = self.rounded(size)
        return max(self.min, size if self.max is None else min(size, self.max))


def followers(names: Collection[str]) -> dict[str, tuple[int, str]]:
    """Return number and name of the dimension that others are a multiple of, by their names.

    "2*height" follows from "height", where that is a dimension as well.
    """
    found = {name: MULTIPLE.fullmatch(name) for name in names}
    return {
        name: (int(parts["number"]), parts["root"])
        for name, parts in found.items()
        if parts and parts["root"] in names
    }


def related(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes by name, with those that follow from others as these say."""
    found = {name: number * sizes[root] for name, (number, root) in followers(sizes).items()}
    return {**sizes, **found}


def follow(dims: Mapping[str, DimRange]) -> dict[str, DimRange]:
    """Return ranges by name, with those of dimensions that follow from others as these say."""
    found = {name: dims[root].times(number) for name, (number, root) in followers(dims).items()}
    return {**dims, **found}


def sequence(dims: Mapping[str, DimRange]) -> str | None:
    """Return the first dimension that is not the batch."""
    return next((name for name, limits in dims.items() if not limits.batch), None)


def batch_dims(axes: Mapping[str, Collection[int]]) -> set[str]:
    """Return the dimensions called batch; if none is, those that lead where others follow.

    ``axes`` are the places each dimension has in the shapes of the inputs.
    """
    called = {name for name in axes if name.lower().startswith("batch")}
    leading = {name for name, places in axes.items() if 0 in places}
    if called or len(leading) < len(axes):
        return called or leading
    # A square mask leads with the length as well: the batch is what does nothing else.
    only = {name for name in leading if set(axes[name]) == {0}}
    return only if len(only) < len(axes) else set()


def parse(options: Iterable[str]) -> dict[str, DimRange]:
    """Parse ``NAME=MIN:OPT:MAX`` options to ranges by name.

    Raises:
        UsageError: an option that is not of that form, or whose sizes are not in order.
    """
    ranges: dict[str, DimRange] = {}
    for option in options:
        name, separator, sizes = option.partition("=")
        parts = sizes.split(":")
        if not name or not separator or len(parts) != 3 or not all(p.isdecimal() for p in parts):
            raise UsageError(
                f"--dim {option!r} is not of the form NAME=MIN:OPT:MAX, for example "
                "--dim seq=1:1024:8192."
            )
        if name in ranges:
            raise UsageError(f"--dim {name} is given twice.")
        low, opt, high = map(int, parts)
        least = 0 if name == PAST else 1
        if not least <= low <= opt <= high or high == 0:
            raise UsageError(
                f"--dim {option}: found MIN {low}, OPT {opt}, MAX {high}; "
                f"expected {least} <= MIN <= OPT <= MAX."
            )
        ranges[name] = DimRange(low, opt, high)
    return ranges


def merge(found: Mapping[str, DimRange], requested: Mapping[str, DimRange]) -> dict[str, DimRange]:
    """Narrow the model's own ranges to the requested ones.

    That of PAST is one of states, which are not known yet: it is left out where the model has none.

    Raises:
        UsageError: a name the model does not have, one whose sizes follow from another's, or a
            range beyond the model's own.
    """
    merged = dict(found)
    for name, target in requested.items():
        if name == PAST and name not in found:
            continue
        if name not in found:
            known = ", ".join(sorted(found)) or "none: every dimension is fixed"
            raise UsageError(f"--dim {name}: the model has no such dimension; it has {known}.")
        if name in followers(found):
            number, root = followers(found)[name]
            raise UsageError(
                f"--dim: the sizes of {name} are {number} times those of {root}. Limit {root}."
            )
        own = found[name]
        for size in (target.min, target.max):
            if size is not None and not own.allows(size):
                bound = "unbounded" if own.max is None else own.max
                raise UsageError(
                    f"--dim {name}: found {size}; the model takes {own.min} to {bound}"
                    f"{', ' + own.steps if own.steps else ''}."
                )
        merged[name] = replace(target, batch=own.batch, multiple=own.multiple)
    return follow(merged)
