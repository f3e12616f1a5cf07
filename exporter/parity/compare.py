"""Comparing one output with its reference, and the outcome as a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linexport.manifest.proof import CountRecord, ElementRecord
from linexport.parity.tolerances import ROUNDING, Tolerance

EDGES = np.arange(-12.0, 0.5, 0.5)
"""Bins of the error histogram, in log10 of the error relative to the largest reference."""

BLOCK = 2**20
"""Values compared at once: the logits of a long sequence fill memory several times over."""


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
    worst: ElementRecord | None
    nan: CountRecord
    inf: CountRecord
    passed: bool
    reason: str | None
    counts: tuple[int, ...]


def compare_arrays(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, rounding: float = 0.0
) -> Comparison:
    """``got`` against ``expected``; see ``Comparison``.

    ``rounding`` is how far the original's float32 output is from its own float64 output.
    """
    expected, got = np.asarray(expected), np.asarray(got)
    nan = CountRecord(_count(np.isnan, expected), _count(np.isnan, got))
    inf = CountRecord(_count(np.isinf, expected), _count(np.isinf, got))
    none = (0,) * (len(EDGES) - 1)
    if expected.shape != got.shape:
        reason: str | None = f"shape {got.shape}; expected {expected.shape}"
        return Comparison(float("inf"), float("inf"), None, nan, inf, False, reason, none)
    if expected.size == 0:
        return Comparison(0.0, 0.0, None, nan, inf, True, None, none)
    magnitude = largest(expected)
    absolute, worst, one_sided, counts = -1.0, 0, 0, np.zeros(len(EDGES) - 1, np.int64)
    wide, found = expected.reshape(-1), got.reshape(-1)
    for block in in_blocks(expected.size):
        difference = _difference(wide[block], found[block])
        place = int(difference.argmax())
        if difference[place] > absolute:
            absolute, worst = float(difference[place]), block.start + place
        one_sided += int(np.isinf(difference).sum())
        counts += _histogram(difference, magnitude)
    relative = absolute / magnitude if magnitude else (0.0 if absolute == 0 else float("inf"))
    passed = absolute <= tolerance.limit(magnitude, rounding)
    reason = None
    if one_sided:
        reason = f"{one_sided} values are NaN or infinite on one side only"
    elif not passed and not tolerance.is_half and ROUNDING * rounding > tolerance.most * magnitude:
        reason = (
            f"the original itself loses {rounding / magnitude:.0e} of its largest value to the "
            f"rounding of float32: at {tolerance.most:g} and more parity of the artifact "
            "cannot be decided"
        )
    return Comparison(
        relative,
        absolute,
        ElementRecord(
            tuple(int(i) for i in np.unravel_index(worst, expected.shape)),
            float(wide[worst]),
            float(found[worst]),
        ),
        nan,
        inf,
        bool(passed),
        reason,
        tuple(int(c) for c in counts),
    )


def compare_rows(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, rounding: np.ndarray
) -> Comparison:
    """``compare_arrays`` with a rounding of its own for each row, see ``by_row``."""
    found = compare_arrays(expected, got, tolerance, float(rounding.max(initial=0.0)))
    if expected.shape != got.shape:
        return found
    off = rows_off(expected, got, tolerance, rounding)
    if not off.any() or found.reason is not None or found.nan.got + found.inf.got:
        return replace(found, passed=found.passed and not off.any())
    distances = np.where(off, by_row(expected, got), -1.0)
    worst = int(distances.argmax())
    at = ", ".join(map(str, np.unravel_index(worst, expected.shape[:-1])))
    size = largest(expected) or 1.0
    reason = (
        f"{off.sum():,} of {off.size:,} tokens are off by more than rounding of the original "
        f"explains: at the worst, [{at}], by {distances[worst] / size:.1e} of the largest value, "
        f"where {tolerance.limit(size, float(rounding[worst])) / size:.1e} is allowed"
    )
    return replace(found, passed=False, reason=reason)


def rows_off(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, rounding: np.ndarray
) -> np.ndarray:
    """Return which rows are off by more than their rounding allows."""
    magnitude = largest(expected)
    limits = np.array([tolerance.limit(magnitude, float(x)) for x in rounding])
    return ~(by_row(expected, got) <= limits)


def by_row(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Return the largest difference of each row; infinite if one is finite on one side only."""
    pairs = zip(rows(expected), rows(got), strict=True)
    return np.array([_difference(a, b).max(initial=0.0) for a, b in pairs], np.float64)


def rows(values: np.ndarray) -> np.ndarray:
    """Return values (..., n) as rows (rows, n), such as the logits of each token."""
    return values.reshape(-1, values.shape[-1])


def largest(values: np.ndarray) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    sizes = (np.max(np.abs(x), initial=0.0) for x in _finite_blocks(values))
    return float(max(sizes, default=0.0))


def in_blocks(size: int) -> Iterator[slice]:
    """The places of so many values, ``BLOCK`` at a time."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def _finite_blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    flat = values.reshape(-1)
    for places in in_blocks(flat.size):
        block = flat[places].astype(np.float64)
        yield block[np.isfinite(block)]


def _difference(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """|got - expected|; a value that is finite on one side only is as wrong as can be."""
    wide, found = expected.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (wide == found) | (np.isnan(wide) & np.isnan(found))
        difference = np.where(same, 0.0, np.abs(found - wide))
    return np.where(np.isnan(difference), np.inf, difference)


def _count(test: Any, values: np.ndarray) -> int:
    return int(test(values).sum()) if values.dtype.kind == "f" else 0


def _histogram(difference: np.ndarray, magnitude: float) -> np.ndarray:
    """Counts over ``EDGES``; whatever lies below the first edge falls in the first bin."""
    bins = len(EDGES) - 1
    if magnitude == 0:
        return np.zeros(bins, np.int64)
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log10(difference / magnitude), EDGES[0], EDGES[-1])
    # Bins are equally wide; the last one includes its upper edge.
    places = ((logs - EDGES[0]) / (EDGES[1] - EDGES[0])).astype(np.int64)
    return np.bincount(np.minimum(places, bins - 1), minlength=bins)
