"""A linearisation -> page and terminal: the verdict, every layer, accuracy, cost by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linexport.manifest.linearization_records import (
    AttentionRow,
    FeedForwardRow,
    FeedForwardTimes,
    LinearizationReport,
)
from linexport.report import tables
from linexport.report.error_tables import error_tables, weak_places
from linexport.report.linear_costs import chart_texts, cost_table, short_cost_table
from linexport.report.linear_search import search_texts
from linexport.report.page import template
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import amount, count, number, plain
from linexport.system.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

NONE = "–"


def linearization_page(report: LinearizationReport) -> str:
    """One self-contained HTML document."""
    layers, feed_forward = _layers(report), _feed_forward(report)
    return (
        template("linearization.html")
        .render(
            verdict=report.verdict,
            bad=report.status != "ok",
            facts=list(_facts(report).items()),
            attention=bool(report.layers),
            layers=layers,
            feed_forward=feed_forward,
            replaced=bool(layers or feed_forward),
            feed_forward_times=_feed_forward_times(report),
            kept=_kept(report),
            distillation=_distillation(report),
            by_position=error_tables(report.layers, "position"),
            by_sharpness=error_tables(report.layers, "sharpness"),
            weak=weak_places(report.layers),
            over=report.over,
            **chart_texts(report),
            **search_texts(report.search),
            left_out=report.lengths_left_out,
            costs=cost_table(report),
            unmeasured=plain(report.reason or "it was left out (--no-bench)"),
            environment=tables.environment(report.environment),
        )
        .lstrip()
    )


def print_linearization(
    report: LinearizationReport, console: Console, output: str | None = None
) -> None:
    """The verdict first, then the numbers, and the file that was written; 80 columns wide."""
    style = "bold" if report.status == "ok" else "bold red"
    console.print(printable(report.verdict), markup=False, style=style)
    for name, fact in _facts(report).items():
        console.print(f"{name.lower()}: {printable(fact)}", markup=False, style="dim")
    for table in (_short_layers(report), _short_feed_forward(report), short_cost_table(report)):
        if table is not None:
            console.print()
            console.print(_grid(table))
    for name, reason in _left(report):
        console.print(f"{name} is kept: {printable(reason)}", markup=False, style="yellow")
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


def _grid(table: Table) -> object:
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
        "Parameters": f"{count(numbers.original)} before, {count(numbers.linear)} after, of which "
        f"{count(numbers.not_shared)} are not shared with the original",
    }
    if report.layers:
        found["Error of the rest"] = (
            f"{_tiny(report.rest_error)}, relative, of everything but attention"
        )
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
    uniform = "" if alike is None else f"; with all keys alike {_tiny(alike)}"
    return f"{_tiny(report.output_error)}, relative, held out{uniform}"


def _short_layers(report: LinearizationReport) -> Table | None:
    """``_layers`` for a terminal of 80 columns."""
    rows = []
    for row in report.layers:
        if not row.reason:
            form, size = (row.map, row.features) if row.map else ("pseudo-keys", row.pseudo_keys)
            last = row.multiply_adds[-1]
            error, alike = row.judged_errors or (None, None)
            cells = (form, count(size), _tiny(error), _tiny(alike))
            cost = _times(last.linear / last.original)
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
            Cell(_times(row.cost_factor)),
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
    return _times(row.times[at].factor) if row.times else NONE


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
            Cell(count(row.multiply_adds), _times(row.cost_factor)),
            Cell(count(row.multiply_adds_before)),
        ]
        for row in report.feed_forward
        if not row.reason
    ]
    labels = ["Layer", "Form", "#Degree", "#M", "#Relative error", "#Squared error"]
    return make_table("Feed-forward layers", [*labels, "#Multiply-adds", "#Before"], rows)


def _feed_forward_times(report: LinearizationReport) -> Table | None:
    """Times over those of before, by the number of rows at once."""
    timed = [(row.name, row.times) for row in report.feed_forward if row.times]
    rows = [[Cell(name, tone="code"), *(_timed(one) for one in times)] for name, times in timed]
    labels = [
        f"#{count(one.rows)} row{'s' * (one.rows > 1)}" for _, times in timed[:1] for one in times
    ]
    return make_table("Time by rows at once, over that of before", ["Layer", *labels], rows)


def _timed(one: FeedForwardTimes) -> Cell:
    note = f"{amount(one.after_ms)} ms, before {amount(one.before_ms)}"
    return Cell(_times(one.factor), note, tone="good" if one.factor < 1 else "")


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
    if report.search is not None:
        chosen = next(point for point in report.search.points if point.chosen)
        return (
            "Every form has learned the attention of its layer; the model was then fine-tuned for "
            f"{count(chosen.steps)} steps. Errors are those before fine-tuning."
        )
    if learned is None:
        return "Not distilled: every form is as fitted (--distil STEPS learns from the original)."
    return (
        f"{count(learned.parameters)} numbers were learned in {count(learned.steps)} steps; those "
        f"of step {count(learned.best_step)} are kept, which had the smallest error on held-out "
        "data."
    )


def _times(factor: float | None) -> str:
    """0.0153 -> 0.0153×."""
    return f"{_tiny(factor)}×"


def _tiny(value: object) -> str:
    found = number(value)
    if found is None:
        return NONE
    return amount(found) if found == 0 or 1e-3 <= found < 1e4 else f"{found:.0e}"
