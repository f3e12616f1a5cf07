"""Costs of a linear form by length, or by rows at once -> charts, sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from markupsafe import Markup

from linexport.manifest.linearization_records import FormMemory, FormTimes, LinearizationReport
from linexport.report.length_chart import LATENCY, MEMORY, Point, Quantity, Series, length_chart
from linexport.report.page import drawings
from linexport.report.tables import Cell, Table, headings, make_table
from linexport.report.text import amount, count, number, positive

NONE = "–"
BASELINES = {
    "linear": "linear form, ONNX",
    "original": "original, ONNX",
    "original_pytorch": "original, PyTorch",
}


def chart_texts(report: LinearizationReport) -> dict[str, object]:
    """Charts of time and memory, and the sentences in place of charts of one length."""
    latency, memory = report.latency or (), report.memory or ()
    return {
        "time": _chart(latency, "ms", _quantity(LATENCY, report), "time"),
        "only_time": _only(latency, "ms"),
        "memory": _chart(memory, "mb", _quantity(MEMORY, report), "memory"),
        "only_memory": _only(memory, "mb"),
    }


def cost_table(report: LinearizationReport) -> Table | None:
    """Times and memory of both forms; None where nothing was measured."""
    memory = {row.length: row for row in report.memory or ()}
    rows = []
    for row in report.latency or ():
        held, best = memory.get(row.length), row.best_original_ms
        rows.append(
            [
                Cell(count(row.length)),
                Cell(amount(row.linear_ms), tone="good" if row.linear_ms < best else ""),
                Cell(amount(row.linear_pytorch_ms)),
                Cell(amount(row.original_ms)),
                Cell(amount(row.original_pytorch_ms)),
                Cell(f"{amount(best / row.linear_ms)}×"),
                Cell(_or_none(held and held.linear_mb)),
                Cell(_or_none(held and held.original_mb)),
            ]
        )
    labels = ["#Linear, ms", "#Linear in PyTorch, ms", "#Original, ms"]
    labels += ["#Original in PyTorch, ms", "#Gain", "#Linear, MB", "#Original, MB"]
    return make_table("Cost by length", [_length(report), *labels], rows)


def short_cost_table(report: LinearizationReport) -> Table | None:
    """``cost_table`` for a terminal of 80 columns."""
    found = cost_table(report)
    if found is None:
        return None
    labels = [_length(report), "#Linear ms", "#PyTorch", "#Original ms", "#PyTorch", "#Gain"]
    return Table(found.caption, headings(*labels, "#Linear MB", "#Orig. MB"), found.rows)


def _length(report: LinearizationReport) -> str:
    return "#Rows" if report.over == "rows" else "#Length"


def _quantity(quantity: Quantity, report: LinearizationReport) -> Quantity:
    if report.over == "tokens":
        return quantity
    title = quantity.title.replace("sequence length", "rows at once")
    return replace(quantity, title=title, over="rows at once", counted="rows")


def _chart(
    rows: Sequence[FormTimes] | Sequence[FormMemory], unit: str, quantity: Quantity, ident: str
) -> dict[str, Markup]:
    """A chart over at least two lengths."""
    if len(rows) < 2:
        return {}
    return drawings(partial(length_chart, _series(rows, unit), quantity), ident)


def _only(rows: Sequence[FormTimes] | Sequence[FormMemory], unit: str) -> str:
    """A sentence in place of a chart of one length."""
    if len(rows) != 1:
        return ""
    found = [
        f"{one.name}: {amount(one.points[0].p50)} {unit.replace('mb', 'MB')}"
        for one in _series(rows, unit)
        if one.points
    ]
    summary = "; ".join(found) or "nothing above what was there before"
    return f"One length was measured, {count(rows[0].length)}. {summary[0].upper()}{summary[1:]}."


def _series(rows: Sequence[FormTimes] | Sequence[FormMemory], unit: str) -> list[Series]:
    found = []
    for name, label in BASELINES.items():
        measured = ((row.length, positive(getattr(row, f"{name}_{unit}", None))) for row in rows)
        points = (Point(float(length), y) for length, y in measured if y is not None)
        found.append(Series(label, tuple(points)))
    return found


def _or_none(value: object) -> str:
    return NONE if number(value) is None else amount(value)
