"""The user's data: rows of the module's arguments, some to fit to and some to judge by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linexport.errors import UsageError

HELD_OUT = 0.25
"""Share of the rows that nothing is fitted to."""

BATCH = 32

Rows = tuple[Tensor, ...]
"""The module's arguments in order, each with the same number of rows."""


@dataclass(frozen=True)
class Calibration:
    """Batches of calibration data, split into fitted and held-out rows.

    Attributes:
        fit: rows that maps, memories and weights are fitted to.
        held_out: rows that errors are measured on.
    """

    fit: Rows
    held_out: Rows


def calibration(rows: Rows, seed: int) -> Calibration:
    """Split checked rows."""
    count = len(rows[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    aside = max(1, round(HELD_OUT * count))
    return Calibration(tuple(x[order[aside:]] for x in rows), tuple(x[order[:aside]] for x in rows))


def checked_rows(data: Tensor | Sequence[Tensor]) -> Rows:
    """Return the data as rows.

    Args:
        data: the module's arguments in order, stacked along their first dimension; a single tensor
            for a module of one argument.

    Raises:
        UsageError: no data, arguments of different numbers of rows, rows that are all equal, or
            values that are not finite.
    """
    arguments = (data,) if isinstance(data, Tensor) else tuple(data)
    wrong = [type(x).__name__ for x in arguments if not isinstance(x, Tensor)]
    if wrong or not arguments or any(x.dim() == 0 for x in arguments):
        found = ", ".join(wrong) or f"{len(arguments)} tensors, or one without rows"
        raise UsageError(
            f"The calibration data is {found}; expected one tensor for each argument of the "
            "module, in order, with one row a sample."
        )
    counts = {len(x) for x in arguments}
    if len(counts) != 1:
        raise UsageError(
            f"The calibration data has {', '.join(str(len(x)) for x in arguments)} rows in its "
            "arguments; expected the same number in each."
        )
    count = counts.pop()
    if count < 2:
        raise UsageError(
            f"The calibration data has {count} rows; expected at least 2, one to fit to and one "
            "to judge by. Some hundreds are usual."
        )
    if all(bool((x == x[:1]).all()) for x in arguments):
        raise UsageError(
            f"All {count} rows of the calibration data are equal: they say nothing of the "
            "distribution. Take rows of real, varied inputs."
        )
    for at, x in enumerate(arguments):
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise UsageError(f"Argument {at} of the calibration data has NaN or infinite values.")
    return arguments


def row_batches(rows: Rows, size: int = BATCH) -> Iterator[Rows]:
    """Rows in their order, ``size`` at a time."""
    yield from zip(*(x.split(size) for x in rows), strict=True)


def first_batches(rows: Rows, count: int) -> tuple[list[Rows], list[Rows]]:
    """So many batches, and the others."""
    batches = list(row_batches(rows))
    return batches[:count], batches[count:]
