"""Baselines that are timed at all: quick enough to wait for, and equal to the original."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linexport.parity.compare import compare_arrays
from linexport.parity.tolerances import TOLERANCES
from linexport.timing.latency import Call, Called
from linexport.trace.messages import error_summary, innermost


class Admission:
    """Calls each baseline once at a size, except where its runs so far say that it is too slow.

    Args:
        longest: seconds that a run may take.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.slowest: dict[str, tuple[int, float]] = {}
        """Tokens and seconds of the longest run, by baseline."""

    def once(self, name: str, call: Call, tokens: int) -> Call:
        """Return a baseline, called once, or a call that raises the reason why it is not."""
        reason = self.too_slow(name, tokens)
        if reason is not None:
            return refusing(reason)
        try:
            called = Called(call)
        except Exception as raised:
            return refusing(f"it fails at this size: {error_summary(innermost(raised))[:200]}")
        self.slowest[name] = max(self.slowest.get(name, (1, 0.0)), (tokens, called.seconds))
        return called

    def too_slow(self, name: str, tokens: int) -> str | None:
        """Return why a baseline is not waited for, judged by its longest run so far."""
        before, seconds = self.slowest.get(name, (1, 0.0))
        expected = seconds * tokens / before
        if expected <= self._longest or tokens <= before:
            return None
        return (
            f"not waited for: it took {seconds:.1f} s at {before} tokens, so {expected:.0f} s or "
            f"more; {self._longest:g} s are allowed"
        )


def refusing(reason: str) -> Call:
    """Return a call that raises the reason why there is none."""

    def refuse() -> object:
        raise RuntimeError(reason)

    return refuse


def if_equal(call: Called, expected: Sequence[np.ndarray]) -> Call:
    """Return ``call``, or one that raises if its outputs are not the original's.

    Exports that freeze a length can run at another one and return something else; how fast they
    do that is of no interest.
    """
    got = list(call.take().values())
    if len(got) != len(expected):
        return refusing(f"it has {len(got)} outputs, the original {len(expected)}")
    results = [
        compare_arrays(e, g, TOLERANCES["float32"]) for e, g in zip(expected, got, strict=True)
    ]
    worst = max((r.max_relative_error for r in results if not r.passed), default=None)
    if worst is None:
        return call
    return refusing(f"its output is wrong at this size: relative error {worst:.1e}")
