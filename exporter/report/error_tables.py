"""Errors of linear forms by position and by sharpness -> tables, and sentences on weak places."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import Literal

from linexport.manifest.linearization_records import AttentionRow, ErrorBin
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import amount, count

By = Literal["position", "sharpness"]

NOTABLE = 0.05
"""Share of a layer's queries from which a weak place is reported."""


def error_tables(layers: Sequence[AttentionRow], by: By) -> list[Table]:
    """One table for the layers that have the same bins; the bins are its columns."""
    pairs = [(row, bins) for row in layers if (bins := _bins(row, by))]
    if by == "sharpness":
        bounds = sorted({(one.low, one.high) for _, bins in pairs for one in bins})
        groups = [(bounds, pairs)] if pairs else []
    else:
        groups = [(list(key), list(rows)) for key, rows in groupby(pairs, _bounds)]
    found = []
    for bounds, rows in groups:
        labels = ["Layer", *(f"#{_named(*one, by)}" for one in bounds)]
        cells = [_cells(row, bins, bounds, by) for row, bins in rows]
        table = make_table(f"Error by {by}", labels, cells)
        if table is not None:
            found.append(table)
    return found


def weak_places(layers: Sequence[AttentionRow]) -> list[str]:
    """Sentences on replaced layers that some of the queries would do as well without."""
    return [
        f"{row.name}: no better than the mean of the values for {share:.0%} of its queries, those "
        f"that attend to {' and '.join(_named(one.low, one.high, 'sharpness') for one in weak)} of "
        "their keys"
        for row in layers
        if row.reason is None
        and (weak := [one for one in row.by_sharpness if _is_weak(one)])
        and (share := _share(weak, row.by_sharpness)) >= NOTABLE
    ]


def _bins(row: AttentionRow, by: By) -> tuple[ErrorBin, ...]:
    return row.by_position if by == "position" else row.by_sharpness


def _bounds(pair: tuple[AttentionRow, tuple[ErrorBin, ...]]) -> tuple[tuple[float, float], ...]:
    return tuple((one.low, one.high) for one in pair[1])


def _cells(
    row: AttentionRow,
    bins: Sequence[ErrorBin],
    bounds: Sequence[tuple[float, float]],
    by: By,
) -> list[Cell]:
    by_bounds = {(one.low, one.high): one for one in bins}
    found = [Cell(row.name, "is kept" if row.reason else "", tone="code")]
    for bound in bounds:
        one = by_bounds.get(bound)
        if one is None or one.error is None or one.uniform_error is None:
            found.append(Cell("–"))
            continue
        share = f"; {_percent(_share([one], bins))} of queries" if by == "sharpness" else ""
        note = f"alike {amount(one.uniform_error)}{share}"
        found.append(Cell(amount(one.error), note, tone="open" if _is_weak(one) else ""))
    return found


def _is_weak(one: ErrorBin) -> bool:
    if one.error is None or one.uniform_error is None:
        return False
    return one.error >= one.uniform_error


def _share(some: Sequence[ErrorBin], every: Sequence[ErrorBin]) -> float:
    return sum(one.queries for one in some) / sum(one.queries for one in every)


def _percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def _named(low: float, high: float, by: By) -> str:
    if by == "position":
        return count(low) if low == high else f"{count(low)} to {count(high)}"
    return f"{_fraction(low)} to {_fraction(high)}" if low else f"up to {_fraction(high)}"


def _fraction(share: float) -> str:
    return "all" if share == 1 else str(Fraction(share).limit_denominator(64))
