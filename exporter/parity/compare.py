"""Comparing one output with its reference, and the outcome as a record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from linexport.parity.tolerances import Tolerance

EDGES = np.arange(-12.0, 0.5, 0.5)
"""Bins of the error histogram, in log10 of the error relative to the largest reference."""


@dataclass(frozen=True)
class Comparison:
    """One output against its reference.

    Attributes:
        max_relative_error: largest difference over the largest finite magnitude of the reference.
        max_absolute_error: largest difference.
        worst: place of it, with the expected value and the one found; None if shapes differ.
        nan, inf: counts on both sides.
        passed: within tolerance, with NaN and infinities in the same places.
        reason: why not, where the numbers do not say it.
        counts: histogram of errors over ``EDGES``.
    """

    max_relative_error: float
    max_absolute_error: float
    worst: dict[str, Any] | None
    nan: dict[str, int]
    inf: dict[str, int]
    passed: bool
    reason: str | None
    counts: tuple[int, ...]

    def json(self) -> dict[str, Any]:
        """As written to the manifest, without the histogram."""
        return {k: v for k, v in asdict(self).items() if k != "counts"}


def compare(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, rounding: float = 0.0
) -> Comparison:
    """``got`` against ``expected``; see ``Comparison``.

    ``rounding`` is how far the original's float32 output is from its own float64 output.
    """
    expected, got = np.asarray(expected), np.asarray(got)
    nan = {"expected": _count(np.isnan, expected), "got": _count(np.isnan, got)}
    inf = {"expected": _count(np.isinf, expected), "got": _count(np.isinf, got)}
    none = (0,) * (len(EDGES) - 1)
    if expected.shape != got.shape:
        reason: str | None = f"shape {got.shape}; expected {expected.shape}"
        return Comparison(float("inf"), float("inf"), None, nan, inf, False, reason, none)
    if expected.size == 0:
        return Comparison(0.0, 0.0, None, nan, inf, True, None, none)
    wide, found = expected.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (wide == found) | (np.isnan(wide) & np.isnan(found))
        difference = np.where(same, 0.0, np.abs(found - wide))
    # A value that is finite on one side only is as wrong as can be.
    difference = np.where(np.isnan(difference), np.inf, difference)
    magnitude = largest(wide)
    worst = np.unravel_index(int(difference.argmax()), difference.shape)
    absolute = float(difference[worst])
    relative = absolute / magnitude if magnitude else (0.0 if absolute == 0 else float("inf"))
    passed = absolute <= tolerance.limit(magnitude, rounding)
    apart = int(np.isinf(difference).sum())
    reason = f"{apart} values are NaN or infinite on one side only" if apart else None
    return Comparison(
        relative,
        absolute,
        {
            "index": [int(i) for i in worst],
            "expected": float(wide[worst]),
            "got": float(found[worst]),
        },
        nan,
        inf,
        bool(passed),
        reason,
        _histogram(difference, magnitude),
    )


def largest(values: np.ndarray) -> float:
    """Of the finite magnitudes; 0 if there are none."""
    return float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0))


def _count(test: Any, values: np.ndarray) -> int:
    return int(test(values).sum()) if values.dtype.kind == "f" else 0


def _histogram(difference: np.ndarray, magnitude: float) -> tuple[int, ...]:
    """Counts over ``EDGES``; whatever lies below the first edge falls in the first bin."""
    if magnitude == 0:
        return (0,) * (len(EDGES) - 1)
    with np.errstate(divide="ignore"):
        logs = np.log10(difference.ravel() / magnitude)
    counts, _ = np.histogram(np.clip(logs, EDGES[0], EDGES[-1]), EDGES)
    return tuple(int(c) for c in counts)
