"""A linearisation -> page and terminal: the verdict, every layer, accuracy, cost by length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from linexport.report import tables
from linexport.report.length_chart import LATENCY, MEMORY, Point, Series, length_chart
from linexport.report.page import drawings, template
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import (
    amount,
    count,
    mapping,
    number,
    objects,
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


def linearization_page(report: Mapping[str, Any]) -> str:
    """One self-contained HTML document."""
    return (
        template("linearization.html")
        .render(
            verdict=plain(report.get("verdict")),
            bad=report.get("status") != "ok",
            facts=list(_facts(report).items()),
            layers=_layers(report),
            feed_forward=_feed_forward(report),
            kept=_kept(report),
            distillation=_distillation(report),
            time=drawings(partial(length_chart, _series(report, "latency", "ms"), LATENCY), "time"),
            memory=drawings(
                partial(length_chart, _series(report, "memory", "mb"), MEMORY), "memory"
            ),
            costs=_costs(report),
            unmeasured=plain(report.get("reason") or "it was left out (--no-bench)"),
            environment=tables.environment(mapping(report.get("environment"))),
        )
        .lstrip()
    )


def print_linearization(report: Mapping[str, Any], console: Any) -> None:
    """The verdict first, then the numbers."""
    style = "bold" if report.get("status") == "ok" else "bold red"
    console.print(printable(plain(report.get("verdict"))), markup=False, style=style)
    for name, fact in _facts(report).items():
        console.print(f"{name.lower()}: {printable(fact)}", markup=False, style="dim")
    for table in (_layers(report), _feed_forward(report), _costs(report)):
        if table is not None:
            console.print()
            console.print(_grid(table))
    for row in _left(report):
        console.print(
            f"{row.get('name')} stays: {printable(plain(row['reason']))}",
            markup=False,
            style="yellow",
        )
    if report.get("output"):
        console.print(f"\nwritten {report['output']}", soft_wrap=True, markup=False)
        console.print(
            f"next    linexport convert {report['output']} --output artifact",
            soft_wrap=True,
            markup=False,
        )


def _grid(table: Table) -> Any:
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False)
    for column in table.columns:
        grid.add_column(column.label, justify="right" if column.numeric else "left")
    for row in table.rows:
        grid.add_row(*(printable(cell.text) for cell in row))
    return grid


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    source, data = mapping(report.get("source")), mapping(report.get("calibration"))
    numbers, metric = mapping(report.get("parameters")), mapping(report.get("metric"))
    found = {
        "Model": plain(source.get("description")),
        "Calibration": f"{count(data.get('rows'))} rows, {count(data.get('held_out'))} held out",
        "Error of the outputs": f"{_tiny(report.get('output_error'))}, relative, held out",
        "Everything else": f"{_tiny(report.get('rest_error'))} from the original, with softmax "
        "attention left in",
        "Parameters": f"{count(numbers.get('original'))} before, {count(numbers.get('linear'))} "
        f"after, of which {count(numbers.get('not_shared'))} are not shared with the original",
    }
    if metric:
        limit = number(report.get("max_drop"))
        allowed = "" if limit is None else f"; it may get worse by {limit:g}"
        found[plain(metric.get("name"))] = (
            f"{amount(metric.get('before'))} before, {amount(metric.get('after'))} after{allowed}"
        )
    distilled = mapping(report.get("distillation"))
    if distilled:
        found["Distillation"] = (
            f"{count(distilled.get('steps'))} of {count(distilled.get('asked'))} steps; "
            f"squared error of the layers {_tiny(distilled.get('before'))} before, "
            f"{_tiny(distilled.get('after'))} after"
        )
    return {**found, "Seed": plain(report.get("seed"))}


def _layers(report: Mapping[str, Any]) -> Table | None:
    rows = [_layer(row) for row in objects(report.get("layers")) if not row.get("reason")]
    labels = ["Layer", "Attention", "Form", "#M", "#Error alone", "#All keys alike"]
    labels += ["#Error in the model", "#Multiply-adds", "#Before"]
    return make_table("Layers", labels, rows)


def _layer(row: Mapping[str, Any]) -> list[Cell]:
    kind = "causal" if row.get("causal") else "cross" if row.get("cross") else "bidirectional"
    note = f"{count(row.get('heads'))} heads of {count(row.get('head_dim'))}"
    adds = objects(row.get("multiply_adds"))
    last = adds[-1] if adds else {}
    form, size, extra = plain(row.get("map")), count(row.get("features")), ""
    if row.get("pseudo_keys") is not None:
        form, size, kind = "pseudo-keys", count(row["pseudo_keys"]), "static memory"
        extra = (
            f"held out {_tiny(row.get('held_out_error'))}; the mean of the values has "
            f"{_tiny(row.get('mean_of_values_error'))}"
        )
    elif row.get("local_error") is not None:
        extra = f"{_tiny(row['local_error'])} from exact masked attention"
    return [
        Cell(plain(row.get("name")), tone="code"),
        Cell(kind, note),
        Cell(form, extra, tone="strong"),
        Cell(size),
        Cell(_tiny(row.get("attention_error"))),
        Cell(_tiny(row.get("uniform_error"))),
        Cell(_tiny(row.get("layer_error"))),
        Cell(
            count(last.get("linear")),
            f"at {count(last.get('length'))} tokens" if last else "",
        ),
        Cell(count(last.get("original"))),
    ]


def _feed_forward(report: Mapping[str, Any]) -> Table | None:
    rows = [
        [
            Cell(plain(row.get("name")), tone="code"),
            Cell(plain(row.get("form")), plain(row.get("activation")), tone="strong"),
            Cell(count(row.get("degree"))),
            Cell(count(row.get("features"))),
            Cell(_tiny(row.get("relative_error"))),
            Cell(_tiny(row.get("error")), _promised(row)),
            Cell(count(row.get("multiply_adds"))),
            Cell(count(row.get("multiply_adds_before"))),
        ]
        for row in objects(report.get("feed_forward"))
        if not row.get("reason")
    ]
    labels = ["Layer", "Form", "#Degree", "#M", "#Relative error", "#Squared error"]
    return make_table("Feed-forward layers", [*labels, "#Multiply-adds", "#Before"], rows)


def _promised(row: Mapping[str, Any]) -> str:
    return "" if row.get("bound") is None else f"at most {_tiny(row['bound'])} in theory"


def _left(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Layers of both kinds that were not replaced."""
    rows = [*objects(report.get("layers")), *objects(report.get("feed_forward"))]
    return [row for row in rows if row.get("reason")]


def _kept(report: Mapping[str, Any]) -> Table | None:
    rows = [
        [Cell(plain(row.get("name")), tone="code"), Cell(plain(row["reason"]))]
        for row in _left(report)
    ]
    return make_table("Left as they are", ["Layer", "Why"], rows)


def _distillation(report: Mapping[str, Any]) -> str:
    distilled = mapping(report.get("distillation"))
    if not distilled:
        return "Not distilled: every form is as fitted (--distil STEPS learns from the original)."
    return (
        f"{count(distilled.get('parameters'))} numbers were learned in "
        f"{count(distilled.get('steps'))} steps; those of step {count(distilled.get('best_step'))} "
        "are kept, which had the smallest error on held-out data."
    )


def _costs(report: Mapping[str, Any]) -> Table | None:
    memory = {row.get("length"): row for row in objects(report.get("memory"))}
    rows = []
    for row in objects(report.get("latency")):
        length = row.get("length")
        held = mapping(memory.get(length))
        best = min(row["original_ms"], row["original_pytorch_ms"])
        won = row["linear_ms"] < best
        rows.append(
            [
                Cell(count(length)),
                Cell(amount(row["linear_ms"]), tone="good" if won else ""),
                Cell(amount(row["linear_pytorch_ms"])),
                Cell(amount(row["original_ms"])),
                Cell(amount(row["original_pytorch_ms"])),
                Cell(f"{best / row['linear_ms']:.2f}×"),
                Cell(_or_none(held.get("linear_mb"))),
                Cell(_or_none(held.get("original_mb"))),
            ]
        )
    labels = ["#Length", "#Linear, ms", "#Linear in PyTorch, ms", "#Original, ms"]
    labels += ["#Original in PyTorch, ms", "#Gain"]
    return make_table("Cost by length", [*labels, "#Linear, MB", "#Original, MB"], rows)


def _series(report: Mapping[str, Any], rows: str, unit: str) -> list[Series]:
    found = objects(report.get(rows))
    return [
        Series(
            label,
            tuple(
                Point(float(row["length"]), float(row[f"{name}_{unit}"]))
                for row in found
                if positive(row.get(f"{name}_{unit}")) is not None
            ),
        )
        for name, label in BASELINES.items()
    ]


def _or_none(value: Any) -> str:
    return NONE if number(value) is None else amount(value)


def _tiny(value: Any) -> str:
    found = number(value)
    if found is None:
        return NONE
    return amount(found) if found == 0 or 1e-3 <= found < 1e4 else f"{found:.0e}"
