"""The first token at which a value differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_axis(shape: Sequence[int], named: Sequence[object], sizes: dict[str, int]) -> int | None:
    """Return the axis that holds the tokens.

    Args:
        shape: of the value.
        named: the same as far as the graph states it, dynamic sizes by name; may be empty.
        sizes: dynamic sizes; the last non-batch one is the sequence axis.
    """
    lengths = [(name, size) for name, size in sizes.items() if name != "batch"]
    if not lengths:
        return None
    name, size = lengths[-1]
    if len(named) == len(shape) and name in named:
        return list(named).index(name)
    places = [axis for axis, n in enumerate(shape) if axis and n == size]
    return places[0] if len(places) == 1 else None


def first_token(
    expected: np.ndarray, got: np.ndarray, axis: int, limit: float
) -> tuple[int, int] | None:
    """Return row and token of the first error above a limit; row 0 where tokens come first."""
    error = np.abs(np.float64(got) - np.float64(expected))
    wrong = ~(error <= limit)
    if not wrong.any():
        return None
    wrong = np.moveaxis(wrong, axis, -1)
    rows = wrong.reshape(wrong.shape[0] if axis else 1, -1, wrong.shape[-1]).any(1)
    token = int(rows.any(0).argmax())
    return int(rows[:, token].argmax()), token
