"""Which matches are to blame where an artifact with all of them is not equal to its original.

    passes(left_out)    the conversion without those matches is equal to the original

By bisection: of two halves one is often innocent as a whole. Matches that are equal one by one and
wrong together are left out together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TRIALS = 16
"""Conversions made to find them; beyond that all that are still suspected are left out."""


def blamed(matches: Sequence[str], passes: Callable[[frozenset[str]], bool]) -> frozenset[str]:
    """Return matches without which the conversion passes; none where no matches are to blame.

    Args:
        matches: names of the values that matches compute; with all of them it does not pass.
        passes: converts again without some of them; called a few times for each one to blame.
    """
    if not matches or not passes(frozenset(matches)):
        return frozenset()
    trials = 1

    def holds(left_out: frozenset[str]) -> bool:
        nonlocal trials
        trials += 1
        return passes(left_out)

    def search(suspects: Sequence[str], left_out: frozenset[str]) -> frozenset[str]:
        """Bisect: return the suspects whose removal, with ``left_out``, makes the model pass."""
        if len(suspects) == 1 or trials >= TRIALS:
            return frozenset(suspects)
        half = len(suspects) // 2
        first, second = suspects[:half], suspects[half:]
        if holds(left_out | frozenset(second)):
            return search(second, left_out)
        if holds(left_out | frozenset(first)):
            return search(first, left_out)
        # Each half has some to blame: those of the first are found without the second.
        found = search(first, left_out | frozenset(second))
        return found | search(second, left_out | found)

    return search(matches, frozenset())
