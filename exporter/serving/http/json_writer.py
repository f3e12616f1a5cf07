"""Answers as JSON, written in short steps: on a thread, the event loop has its turns meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

AT_ONCE = 2**12
"""Numbers that are written at once; of items of other lists a sixteenth of that."""

FEW = 64
"""Items of a list that may hold arrays; those of longer ones are written together."""

WIDEST = {"b": 7, "i": 22, "u": 22, "f": 26}
"""Most characters of a number in a list, with what is between two, by NumPy's kind."""


def encoded(value: object) -> bytes:
    """Return nested dicts, lists, arrays and scalars as JSON."""
    return "".join(_parts(value)).encode()


def largest(count: int, dtype: np.dtype[np.generic]) -> int:
    """Return the most bytes that so many numbers take."""
    return count * WIDEST.get(dtype.kind, WIDEST["f"])


def _parts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        opening = "{"
        for name, inner in value.items():
            yield f"{opening}{json.dumps(name)}: "
            yield from _parts(inner)
            opening = ", "
        yield "}" if value else "{}"
    elif isinstance(value, np.ndarray):
        yield from _listed(value.ravel(), AT_ONCE)
    elif isinstance(value, list) and len(value) > FEW:
        yield from _listed(value, AT_ONCE // 16)
    elif isinstance(value, list):
        opening = "["
        for inner in value:
            yield opening
            yield from _parts(inner)
            opening = ", "
        yield "]" if value else "[]"
    else:
        yield json.dumps(value)


def _listed(values: Any, at_once: int) -> Iterator[str]:
    opening = "["
    for start in range(0, len(values), at_once):
        part = values[start : start + at_once]
        yield opening
        yield json.dumps(part.tolist() if isinstance(part, np.ndarray) else part)[1:-1]
        opening = ", "
    yield "]" if len(values) else "[]"
