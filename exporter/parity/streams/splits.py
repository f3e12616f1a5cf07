"""The sequences that streaming is checked on, and the pieces each of them is cut into.

A sequence is run twice: in as few calls as it fits in, and in many. Both give the same if nothing
but the states crosses from one call to the next. Single tokens follow each point at which a
constant of the model first reaches behind the beginning, once and twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from linexport.graph.dims import DimRange

SPLIT_TOKENS = 150
TRIALS = 4

MULTIPLES = (1, 2, 3)
"""Pieces of tokens that come in multiples, as multiples."""

LONG_STREAM = 2_100
LONGEST_CALL, FAR_CALL = 8_192, 2_048
"""Tokens of one call: of a graph with pairs of tokens this many squared are in memory. Of a longer
sequence the second: its pairs are of this many and all."""

SINGLE = 3
"""Single tokens behind each place at which a constant first reaches the beginning."""

BEHIND = 16
"""Tokens behind the last of these places."""


@dataclass(frozen=True)
class Split:
    """A sequence in few calls, and the same in many.

    Attributes:
        calls: tokens of each of the few.
        pieces: tokens of each of the many.
    """

    calls: tuple[int, ...]
    pieces: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(self.pieces)

    @property
    def compares(self) -> bool:
        """Return whether two different runs are compared."""
        return self.calls != self.pieces


def usual(
    limits: DimRange, longest: int | None, seed: int, single: int | None = None
) -> list[Split]:
    """Return splits of ``SPLIT_TOKENS`` tokens: single tokens first, then random pieces.

    Args:
        limits: the tokens that a call takes.
        longest: the tokens that a sequence may have; None for any number.
        seed: of the random places.
        single: single tokens before one piece of the others; None for single ones alone.
    """
    target = max(SPLIT_TOKENS, sum(MULTIPLES) * limits.multiple)
    length = limits.nearest(target if longest is None else min(target, longest))
    units = length // limits.multiple
    if units < 2:
        return []
    cuts: list[Sequence[int]] = [range(1, min(units, (single or units) + 1))]
    for trial in range(1, TRIALS):
        count = min(1 + 2 * trial, units - 1)
        cuts.append(random.Random(seed + trial).sample(range(1, units), count))
    if limits.multiple > 1 and units == sum(MULTIPLES):
        cuts[1] = [MULTIPLES[0], sum(MULTIPLES[:2])]
    return [_cut(units, places, limits, length) for places in cuts]


def long(limits: DimRange, length: int, reaches: Sequence[int], call: int, seed: int) -> Split:
    """Return a split of a long sequence, with single tokens where a constant reaches its beginning.

    Args:
        limits: the tokens that a call takes.
        length: of the sequence, at least; its last tokens are single ones.
        reaches: how many tokens behind its own each constant reaches.
        call: most tokens of one call.
        seed: of the random places.
    """
    unit = limits.multiple
    units = max(2, -(-length // unit))
    ends = [n * reach // unit for reach in reaches for n in (1, 2)] + [units - SINGLE]
    single = {end + n for end in ends for n in range(-1, SINGLE + 1)}
    choose = random.Random(seed)
    places = {*choose.sample(range(1, units), min(6, units - 1)), *single}
    return _cut(units, [n for n in places if 0 < n < units], limits, call)


def _cut(units: int, places: Sequence[int], limits: DimRange, call: int) -> Split:
    """Return a sequence of so many units cut at these places, and in the longest calls."""
    unit, widest = limits.multiple, max(1, call // limits.multiple)
    if limits.max is not None:
        widest = min(widest, limits.max // unit)
    calls = [min(widest, units - n) for n in range(0, units, widest)]
    ends = sorted({*places, units})
    pieces = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    parts = [p for n in pieces for p in (*[widest] * (n // widest), n % widest) if p]
    return Split(tuple(unit * n for n in calls), tuple(unit * n for n in parts))
