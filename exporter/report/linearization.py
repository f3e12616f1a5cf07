"""A linearisation -> page and terminal: the verdict, every layer, accuracy, cost by length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from linexport.manifest.linearization_records import (
    AttentionRow,
    FeedForwardRow,
    FormMemory,
    FormTimes,
    LinearizationReport,
)
from linexport.report import tables
from linexport.report.error_tables import error_tables, weak_places
from linexport.report.length_chart import LATENCY, MEMORY, Point, Quantity, Series, length_chart
from linexport.report.page import drawings, template
from linexport.report.tables import Cell, Table, headings, make_table
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
            by_position=error_tables(report.layers, "position"),
            by_sharpness=error_tables(report.layers, "sharpness"),
            weak=weak_places(report.layers),
            time=_chart(report.latency or (), "ms", LATENCY, "time"),
            only_time=_only(report.latency or (), "ms"),
            memory=_chart(report.memory or (), "mb", MEMORY, "memory"),
            only_memory=_only(report.memory or (), "mb"),
            left_out=report.lengths_left_out,
            costs=_costs(report),
            unmeasured=plain(report.reason or "it was left out (--no-bench)"),
            environment=tables.environment(report.environment),
        )
        .lstrip()
    )


def print_linearization(
    report: LinearizationReport, console: Any, output: str | None = None
) -> None:
    """The verdict first, then the numbers, and the file that was written; 80 columns wide."""
    style = "bold" if report.status == "ok" else "bold red"
    console.print(printable(report.verdict), markup=False, style=style)
    for name, fact in _facts(report).items():
        console.print(f"{name.lower()}: {printable(fact)}", markup=False, style="dim")
    for table in (_short_layers(report), _short_feed_forward(report), _short_costs(report)):
        if table is not None:
            console.print()
            console.print(_grid(table))
    for name, reason in _left(report):
        console.print(f"{name} stays: {printable(reason)}", markup=False, style="yellow")
    for words in (*weak_places(report.layers), report.lengths_left_out):
        if words:
            console.print(printable(words), markup=False, style="yellow")
    if output is None:
        console.print("\nnothing written: no layer was replaced", markup=False)
    else:
        console.print(f"\nwritten {output}", soft_wrap=True, markup=False)
        console.print(
            f"next    linexport convert {output} --output artifact", soft_wrap=True, markup=False
        )


def _grid(table: Table) -> Any:
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False)
    for column in table.columns:
        grid.add_column(
            column.label, justify="right" if column.numeric else "left", overflow="fold"
        )
    for row in table.rows:
        grid.add_row(*(printable(cell.text) for cell in row))
    return grid


def _facts(report: LinearizationReport) -> dict[str, str]:
    data, numbers, metric = report.calibration, report.parameters, report.metric
    found = {
        "Model": plain(report.source.description),
        "Calibration": f"{count(data.rows)} rows, {count(data.held_out)} held out",
        "Error of the outputs": _outputs(report),
        "Error of the rest": f"{_tiny(report.rest_error)}, relative, of everything but attention",
        "Parameters": f"{count(numbers.original)} before, {count(numbers.linear)} after, of which "
        f"{count(numbers.not_shared)} are not shared with the original",
    }
    if numbers.exported is not None:
        found["In an artifact"] = (
            f"{count(numbers.exported)} numbers, {numbers.original / numbers.exported:.3g} times "
            f"fewer than the original's {count(numbers.original)}: replaced keys and values are "
            "left out"
        )
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


def _outputs(report: LinearizationReport) -> str:
    alike = report.uniform_output_error
    beside = "" if alike is None else f"; with all keys alike {_tiny(alike)}"
    return f"{_tiny(report.output_error)}, relative, held out{beside}"


def _short_layers(report: LinearizationReport) -> Table | None:
    """``_layers`` for a terminal of 80 columns."""
    rows = []
    for row in report.layers:
        if not row.reason:
            form, size = (row.map, row.features) if row.map else ("pseudo-keys", row.pseudo_keys)
            last = row.multiply_adds[-1]
            error, alike = row.judged_errors or (None, None)
            cells = (form, count(size), _tiny(error), _tiny(alike))
            cost = f"{last.linear / last.original:.3g}×"
            rows.append([Cell(one) for one in (row.name, *cells, _tiny(row.layer_error), cost)])
    return make_table(
        "Layers", ["Layer", "Form", "#M", "#Error", "#Alike", "#In model", "#Cost"], rows
    )


def _short_feed_forward(report: LinearizationReport) -> Table | None:
    rows = [
        [
            Cell(row.name),
            Cell(plain(row.form)),
            Cell(count(row.degree)),
            Cell(count(row.features)),
            Cell(_tiny(row.relative_error)),
            Cell(f"{count(row.multiply_adds)}"),
            Cell(f"{row.cost_factor:.3g}×"),
            Cell(_factor(row, -1)),
            Cell(_factor(row, 0)),
        ]
        for row in report.feed_forward
        if row.cost_factor is not None
    ]
    labels = ["Layer", "Form", "#Degree", "#M", "#Error", "#Mult.-adds", "#Cost", "#Time"]
    return make_table("Feed-forward layers", [*labels, "#1 row"], rows)


def _factor(row: FeedForwardRow, at: int) -> str:
    """Time over that of before, at the most or the fewest rows."""
    return f"{row.times[at].factor:.3g}×" if row.times else "-"


def _short_costs(report: LinearizationReport) -> Table | None:
    found = _costs(report)
    if found is None:
        return None
    labels = ["#Length", "#Linear ms", "#PyTorch", "#Original ms", "#PyTorch", "#Gain"]
    return Table(found.caption, headings(*labels, "#Linear MB", "#Orig. MB"), found.rows)


def _layers(report: LinearizationReport) -> Table | None:
    rows = [_layer(row) for row in report.layers if not row.reason]
    labels = ["Layer", "Attention", "Form", "#M", "#Error", "#All keys alike"]
    labels += ["#Error in the model", "#Multiply-adds", "#Before"]
    return make_table("Layers", labels, rows)


def _layer(row: AttentionRow) -> list[Cell]:
    kind = "causal" if row.causal else "cross" if row.cross else "bidirectional"
    heads = f"{count(row.heads)} heads of {count(row.head_dim)}"
    last = row.multiply_adds[-1]
    form, size, extra = plain(row.map), count(row.features), ""
    if row.pseudo_keys is not None:
        form, size, kind = "pseudo-keys", count(row.pseudo_keys), "static memory"
        extra = (
            f"held out {_tiny(row.held_out_error)}; the mean of the values has "
            f"{_tiny(row.mean_of_values_error)}"
        )
    error, alike = row.judged_errors or (None, None)
    note = ""
    if row.distilled_error is not None:
        note = f"as fitted {_tiny(row.attention_error)}"
    elif row.local_error is not None:
        note = "from exact masked attention"
    return [
        Cell(row.name, tone="code"),
        Cell(kind, heads),
        Cell(form, extra, tone="strong"),
        Cell(size),
        Cell(_tiny(error), note),
        Cell(_tiny(alike)),
        Cell(_tiny(row.layer_error)),
        Cell(count(last.linear), f"at {count(last.length)} tokens"),
        Cell(count(last.original)),
    ]


def _feed_forward(report: LinearizationReport) -> Table | None:
    rows = [
        [
            Cell(row.name, tone="code"),
            Cell(
                plain(row.form),
                f"{plain(row.activation)}{', with the layer after it' if row.folded else ''}",
                tone="strong",
            ),
            Cell(count(row.degree)),
            Cell(count(row.features)),
            Cell(_tiny(row.relative_error)),
            Cell(_tiny(row.error), _promised(row)),
            Cell(count(row.multiply_adds), f"{row.cost_factor or 0:.3g} times those of before"),
            Cell(count(row.multiply_adds_before)),
            Cell(_factor(row, -1), _by_rows(row)),
        ]
        for row in report.feed_forward
        if not row.reason
    ]
    labels = ["Layer", "Form", "#Degree", "#M", "#Relative error", "#Squared error"]
    return make_table("Feed-forward layers", [*labels, "#Multiply-adds", "#Before", "#Time"], rows)


def _by_rows(row: FeedForwardRow) -> str:
    named = [f"{one.rows:,}: {one.after_ms:.3g}, {one.before_ms:.3g} ms" for one in row.times or ()]
    return f"rows at once: now, before. {'; '.join(named)}" if named else "not measured"


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
    told = "; ".join(found) or "nothing above what was there before"
    return f"One length was measured, {count(rows[0].length)}. {told[0].upper()}{told[1:]}."


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
