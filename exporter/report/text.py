"""Values of the manifest -> words and numbers for people; anything absent is said to be absent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from linexport.manifest.records import KernelRecord

NO_REASON = "the manifest gives no reason"
ABSENT = f"not measured: {NO_REASON}"
KEPT = "softmax attention, with its keys and values as states"

TARGETS = {
    "ort": "ONNX Runtime",
    "tensorrt": "TensorRT",
    "tensorrt-rtx": "TensorRT-RTX",
}


_PATHS = re.compile(r"\b\w+(?:[./]\w+)+\b")
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_ERRORS = re.compile(r"\d+(?:\.\d+)?e[-+]?\d+")


def grouped(sentences: Iterable[str]) -> list[str]:
    """Return sentences, those that differ in names and numbers alone as one with their count.

    Of these the one with the largest error is shown.
    """
    alike: dict[str, list[str]] = {}
    for sentence in sentences:
        alike.setdefault(_NUMBERS.sub("#", _PATHS.sub("#", sentence)), []).append(sentence)
    return [_one_of(found) for found in alike.values()]


def _one_of(alike: Sequence[str]) -> str:
    worst = max(alike, key=lambda one: max(map(float, _ERRORS.findall(one)), default=0.0))
    return worst if len(alike) == 1 else f"{worst} {others(len(alike) - 1)}."


def others(more: int) -> str:
    """Return how many further cases are like one: "The same in 3 more cases"."""
    return f"The same in {count(more)} more case{'s' if more > 1 else ''}"


def number(value: object) -> float | None:
    """The value as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def positive(value: object) -> float | None:
    """The value as a finite float above zero, else None: what a logarithmic axis can show."""
    found = number(value)
    return found if found is not None and found > 0 else None


def plain(value: object) -> str:
    """Any value as text."""
    return ABSENT if value is None or value == "" else str(value)


def count(value: Any) -> str:
    """1024 -> 1,024."""
    found = number(value)
    return plain(value) if found is None else f"{found:,.10g}"


def error(value: Any) -> str:
    """0.0000031 -> 3.1e-06; exact equality is 0."""
    found = number(value)
    if found is None:
        return plain(value)
    return "0" if found == 0 else f"{found:.1e}"


def exact(value: object) -> str:
    """Return a tensor element with nine digits, which identify a float32 number."""
    found = number(value)
    return plain(value) if found is None else f"{found:.9g}"


def amount(value: object) -> str:
    """Three significant digits without an exponent, for milliseconds, seconds and megabytes."""
    found = number(value)
    if found is None:
        return plain(value)
    if found == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(found))))
    return f"{found:,.{digits}f}"


def format_speedup(slower: object, faster: object) -> str:
    """How many times the second fits into the first: 9.1 and 2.4 -> 3.8×."""
    above, below = positive(slower), positive(faster)
    if above is None or below is None:
        return "–"
    ratio = above / below
    if ratio >= 10:
        return f"{ratio:,.0f}×"
    return f"{ratio:.1f}×" if ratio >= 1 else f"{ratio:.2f}×"


def shape(value: Any) -> str:
    """["batch", 4, 32] -> batch × 4 × 32."""
    if not isinstance(value, list | tuple):
        return plain(value)
    return " × ".join(str(item) for item in value) or "scalar"


def split(sizes: Iterable[object]) -> str:
    """[1, 1, 1, 34] -> 3 pieces of 1 + 34."""
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    return " + ".join(f"{much} pieces of {size}" if much > 1 else str(size) for size, much in runs)


def moment(value: Any) -> str:
    """2026-11-20T12:00:00+00:00 -> 20 November 2026, 12:00 UTC."""
    try:
        when = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return plain(value)
    zone = f" {when.tzname()}" if when.tzinfo else ""
    return f"{when.day} {when:%B %Y, %H:%M}{zone}"


def target_name(name: str) -> str:
    """The runtime's own name."""
    return TARGETS.get(name, name)


def stood_in(found: Sequence[KernelRecord]) -> str:
    """Return which libraries' kernels were computed in PyTorch, and how exactly."""
    packages = ", ".join(dict.fromkeys(one.package for one in found))
    errors = [one.error for one in found if one.error is not None]
    exact = f"; largest difference from its own reference {max(errors):.1e}" if errors else ""
    kernels = "1 kernel" if len(found) == 1 else f"{len(found)} kernels"
    return f"{kernels} of {packages} computed in PyTorch, without a GPU{exact}"
