"""The user's data: rows of the module's arguments, some to fit to and some to judge by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linexport.errors import UsageError

HELD_OUT = 0.25
"""Share of the rows that nothing is fitted to."""

BATCH, MOST_TOKENS = 32, 4096
"""Rows and tokens that a module is run on at once, at most; but two rows at least."""

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


def as_taken(rows: Rows, examples: Sequence[object], ranges: Mapping[int, tuple[int, int]]) -> Rows:
    """Return the rows in the types of a model's example inputs, integers in those of integers.

    numpy makes float64 and files of tokens are often uint16: the model takes neither.

    Args:
        rows: as ``checked_rows`` returns them.
        examples: inputs of the model in order.
        ranges: of integers by the place of the input, the end not included.

    Raises:
        UsageError: integers outside their range.
    """
    found = []
    for at, x in enumerate(rows):
        example = examples[at] if at < len(examples) else None
        if isinstance(example, Tensor) and _kind(example) == _kind(x) != "other":
            x = x.to(example.dtype)
        low, high = ranges.get(at, (1, 0))
        # A range from 1 on is that of masks whose zeros are not drawn for checks.
        if low == 0 and _kind(x) == "integer" and not 0 <= int(x.min()) <= int(x.max()) < high:
            raise UsageError(
                f"Argument {at} of the calibration data has values from {int(x.min())} to "
                f"{int(x.max())}; the model takes 0 to {high - 1}. Give data of its own tokenizer."
            )
        found.append(x)
    return tuple(found)


def _kind(x: Tensor) -> str:
    if x.dtype == torch.bool or x.is_complex():
        return "other"
    return "floating" if x.is_floating_point() else "integer"


def at_once(rows: Rows) -> int:
    """Return how many rows a module is run on at once, whose activations have to be in memory."""
    length = 1 if rows[0].dim() < 2 else int(rows[0].shape[1])
    return max(2, min(BATCH, MOST_TOKENS // max(length, 1)))


def row_batches(rows: Rows) -> Iterator[Rows]:
    """Rows in their order, some at once."""
    yield from zip(*(x.split(at_once(rows)) for x in rows), strict=True)


def first_batches(rows: Rows, count: int) -> tuple[list[Rows], list[Rows]]:
    """So many batches, and the others."""
    batches = list(row_batches(rows))
    return batches[:count], batches[count:]
