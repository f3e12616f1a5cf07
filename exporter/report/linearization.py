"""A linearisation -> page and terminal: the verdict, every layer, accuracy, cost by length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from linexport.manifest.linearization_records import (
    AttentionRow,
    FeedForwardRow,
    FormMemory,
    FormTimes,
    LinearizationReport,
)
from linexport.report import tables
from linexport.report.length_chart import LATENCY, MEMORY, Point, Series, length_chart
from linexport.report.page import drawings, template
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import (
    amount,
    count,
    number,
    plain,
    positive,
    printable,
)

NONE = "–"
BASELINES = {
    "linear": "linear form, ONNX",
    "original": "original, ONNX",
    "original_pytorch": "original, PyTorch",
}


def linearization_page(report: LinearizationReport) -> str:
    """One self-contained HTML document."""
    return (
        template("linearization.html")
        .render(
            verdict=report.verdict,
            bad=report.status != "ok",
            facts=list(_facts(report).items()),
            layers=_layers(report),
            feed_forward=_feed_forward(report),
            kept=_kept(report),
            distillation=_distillation(report),
            time=drawings(
                partial(length_chart, _series(report.latency or (), "ms"), LATENCY), "time"
            ),
            memory=drawings(
                partial(length_chart, _series(report.memory or (), "mb"), MEMORY), "memory"
            ),
            costs=_costs(report),
            unmeasured=plain(report.reason or "it was left out (--no-bench)"),
            environment=tables.environment(report.environment),
        )
        .lstrip()
    )


def print_linearization(
    report: LinearizationReport, console: Any, output: str | None = None
) -> None:
    """The verdict first, then the numbers, and the file that was written."""
    style = "bold" if report.status == "ok" else "bold red"
    console.print(printable(report.verdict), markup=False, style=style)
    for name, fact in _facts(report).items():
        console.print(f"{name.lower()}: {printable(fact)}", markup=False, style="dim")
    for table in (_layers(report), _feed_forward(report), _costs(report)):
        if table is not None:
            console.print()
            console.print(_grid(table))
    for name, reason in _left(report):
        console.print(f"{name} stays: {printable(reason)}", markup=False, style="yellow")
    if output is not None:
        console.print(f"\nwritten {output}", soft_wrap=True, markup=False)
        console.print(
            f"next    linexport convert {output} --output artifact", soft_wrap=True, markup=False
        )


def _grid(table: Table) -> Any:
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False)
    for column in table.columns:
        grid.add_column(column.label, justify="right" if column.numeric else "left")
    for row in table.rows:
        grid.add_row(*(printable(cell.text) for cell in row))
    return grid


def _facts(report: LinearizationReport) -> dict[str, str]:
    data, numbers, metric = report.calibration, report.parameters, report.metric
    found = {
        "Model": plain(report.source.description),
        "Calibration": f"{count(data.rows)} rows, {count(data.held_out)} held out",
        "Error of the outputs": f"{_tiny(report.output_error)}, relative, held out",
        "Everything else": f"{_tiny(report.rest_error)} from the original, with softmax "
        "attention left in",
        "Parameters": f"{count(numbers.original)} before, {count(numbers.linear)} after, of which "
        f"{count(numbers.not_shared)} are not shared with the original",
    }
    if metric is not None:
        allowed = "" if report.max_drop is None else f"; it may get worse by {report.max_drop:g}"
        found[metric.name] = (
            f"{amount(metric.before)} before, {amount(metric.after)} after{allowed}"
        )
    learned = report.distillation
    if learned is not None:
        found["Distillation"] = (
            f"{count(learned.steps)} of {count(learned.asked)} steps; squared error of the layers "
            f"{_tiny(learned.before)} before, {_tiny(learned.after)} after"
        )
    return {**found, "Seed": str(report.seed)}


def _layers(report: LinearizationReport) -> Table | None:
    rows = [_layer(row) for row in report.layers if not row.reason]
    labels = ["Layer", "Attention", "Form", "#M", "#Error alone", "#All keys alike"]
    labels += ["#Error in the model", "#Multiply-adds", "#Before"]
    return make_table("Layers", labels, rows)


def _layer(row: AttentionRow) -> list[Cell]:
    kind = "causal" if row.causal else "cross" if row.cross else "bidirectional"
    note = f"{count(row.heads)} heads of {count(row.head_dim)}"
    last = row.multiply_adds[-1]
    form, size, extra = plain(row.map), count(row.features), ""
    if row.pseudo_keys is not None:
        form, size, kind = "pseudo-keys", count(row.pseudo_keys), "static memory"
        extra = (
            f"held out {_tiny(row.held_out_error)}; the mean of the values has "
            f"{_tiny(row.mean_of_values_error)}"
        )
    elif row.local_error is not None:
        extra = f"{_tiny(row.local_error)} from exact masked attention"
    return [
        Cell(row.name, tone="code"),
        Cell(kind, note),
        Cell(form, extra, tone="strong"),
        Cell(size),
        Cell(_tiny(row.attention_error)),
        Cell(_tiny(row.uniform_error)),
        Cell(_tiny(row.layer_error)),
        Cell(count(last.linear), f"at {count(last.length)} tokens"),
        Cell(count(last.original)),
    ]


def _feed_forward(report: LinearizationReport) -> Table | None:
    rows = [
        [
            Cell(row.name, tone="code"),
            Cell(plain(row.form), plain(row.activation), tone="strong"),
            Cell(count(row.degree)),
            Cell(count(row.features)),
            Cell(_tiny(row.relative_error)),
            Cell(_tiny(row.error), _promised(row)),
            Cell(count(row.multiply_adds)),
            Cell(count(row.multiply_adds_before)),
        ]
        for row in report.feed_forward
        if not row.reason
    ]
    labels = ["Layer", "Form", "#Degree", "#M", "#Relative error", "#Squared error"]
    return make_table("Feed-forward layers", [*labels, "#Multiply-adds", "#Before"], rows)


def _promised(row: FeedForwardRow) -> str:
    return "" if row.bound is None else f"at most {_tiny(row.bound)} in theory"


def _left(report: LinearizationReport) -> list[tuple[str, str]]:
    """Layers of both kinds that were not replaced, by name, with the reason."""
    rows: list[AttentionRow | FeedForwardRow] = [*report.layers, *report.feed_forward]
    return [(row.name, row.reason) for row in rows if row.reason]


def _kept(report: LinearizationReport) -> Table | None:
    rows = [[Cell(name, tone="code"), Cell(reason)] for name, reason in _left(report)]
    return make_table("Left as they are", ["Layer", "Why"], rows)


def _distillation(report: LinearizationReport) -> str:
    learned = report.distillation
    if learned is None:
        return "Not distilled: every form is as fitted (--distil STEPS learns from the original)."
    return (
        f"{count(learned.parameters)} numbers were learned in {count(learned.steps)} steps; those "
        f"of step {count(learned.best_step)} are kept, which had the smallest error on held-out "
        "data."
    )


def _costs(report: LinearizationReport) -> Table | None:
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
                Cell(f"{best / row.linear_ms:.2f}×"),
                Cell(_or_none(held and held.linear_mb)),
                Cell(_or_none(held and held.original_mb)),
            ]
        )
    labels = ["#Length", "#Linear, ms", "#Linear in PyTorch, ms", "#Original, ms"]
    labels += ["#Original in PyTorch, ms", "#Gain"]
    return make_table("Cost by length", [*labels, "#Linear, MB", "#Original, MB"], rows)


def _series(rows: Sequence[FormTimes] | Sequence[FormMemory], unit: str) -> list[Series]:
    found = []
    for name, label in BASELINES.items():
        measured = ((row.length, positive(getattr(row, f"{name}_{unit}", None))) for row in rows)
        points = (Point(float(length), y) for length, y in measured if y is not None)
        found.append(Series(label, tuple(points)))
    return found


def _or_none(value: Any) -> str:
    return NONE if number(value) is None else amount(value)


def _tiny(value: Any) -> str:
    found = number(value)
    if found is None:
        return NONE
    return amount(found) if found == 0 or 1e-3 <= found < 1e4 else f"{found:.0e}"
