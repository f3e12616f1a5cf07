"""The distance of the original's float32 from its own float64, and the note on it."""

from __future__ import annotations

import numpy as np

from linexport.parity.cases import Case
from linexport.parity.compare import in_blocks, largest, rows
from linexport.parity.tolerances import MAX_EXCUSED_SHARE, ROUNDING, Tolerance


def apart(single: np.ndarray, double: np.ndarray) -> float:
    """The largest difference of two outputs where both are finite."""
    single, double = single.reshape(-1), double.reshape(-1)
    worst = 0.0
    for part in in_blocks(single.size):
        with np.errstate(invalid="ignore"):
            worst = max(worst, largest(single[part].astype(np.float64) - double[part]))
    return worst


def apart_by_row(single: np.ndarray, double: np.ndarray) -> np.ndarray:
    """Return ``apart`` of each row, see ``compare.rows``; 0 where none is finite on both sides."""
    found = [apart(a, b) for a, b in zip(rows(single), rows(double), strict=True)]
    return np.array(found, np.float64)


def is_nothing_else(distance: float, output: np.ndarray, case: Case) -> bool:
    """Large or tiny inputs on which the original is mostly rounding."""
    return case.magnitude != 1 and is_mostly_rounding(distance, output)


def is_mostly_rounding(
    distance: float, output: np.ndarray, most: float = MAX_EXCUSED_SHARE
) -> bool:
    """The original loses so much that its float32 output says nothing of another.

    ``most`` is the share of the largest value that it may lose, see ``Tolerance.most``.
    """
    return ROUNDING * distance > most * largest(output)


def note(distance: float, output: np.ndarray, case: Case, tolerance: Tolerance) -> str | None:
    """Return the note on an original this far from its output in float64; None if it is near."""
    magnitude = largest(output)
    if ROUNDING * distance <= tolerance.limit(magnitude):
        return None
    return (
        f"The original itself loses {distance / magnitude:.0e} to the rounding of float32 on the "
        f"{case.name} inputs at {case.at}: there "
    ) + (
        "nothing is compared."
        if is_nothing_else(distance, output, case)
        else f"it is compared in float64 only, within {MAX_EXCUSED_SHARE:.0%}."
        if is_mostly_rounding(distance, output, tolerance.most)
        else f"the artifact may be off by {tolerance.factor:g} times that{tolerance.cap}."
    )
