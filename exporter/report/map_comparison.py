"""A comparison of feature maps, or the list of all, -> page, picture, terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from textwrap import wrap
from typing import TYPE_CHECKING

from markupsafe import Markup

from linexport.manifest.map_records import MapComparison, MapDescription, MapRow
from linexport.report import map_charts, tables
from linexport.report.figures import chart_style, png_sheet
from linexport.report.page import drawings, template
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import amount, count, number, plain
from linexport.system.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

NONE = "–"


def comparison_page(result: MapComparison) -> str:
    """One self-contained HTML document."""
    return (
        template("maps.html")
        .render(
            headline=headline(result),
            facts=list(_facts(result).items()),
            by_time=_charts(result, "us_per_token"),
            by_features=_charts(result, "features"),
            off_chart_by_time=map_charts.off_chart(result, "us_per_token"),
            off_chart_by_features=map_charts.off_chart(result, "features"),
            how_timed=_how_timed(result),
            how_judged=_how_judged(result),
            rows=_table(result),
            not_compared=_not_compared(result),
            maps=_described(result),
            environment=tables.environment(result.environment),
        )
        .lstrip()
    )


def _charts(result: MapComparison, over: map_charts.Over) -> dict[str, Markup]:
    return drawings(partial(map_charts.error_chart, result, over), over)


def picture(result: MapComparison) -> bytes:
    """Return a PNG: the headline, what was compared, and both charts one below the other."""
    facts = _facts(result)
    overs: tuple[map_charts.Over, ...] = ("us_per_token", "features")
    # Mostly one sentence: a map without a time is missing in the first chart alone.
    beyond = dict.fromkeys(map_charts.off_chart(result, over) for over in overs)
    words = [headline(result), f"{facts['Data']}; {facts['Size']}", *beyond]
    lines = [line for sentence in words for line in wrap(sentence, 120)]
    with chart_style():
        charts = [map_charts.draw_error(result, over) for over in overs]
        found = [chart.figure for chart in charts if chart is not None]
        return png_sheet("Feature maps and softmax attention", lines, found)


def headline(result: MapComparison) -> str:
    """Conclusion of a comparison of feature maps, in a sentence or two."""
    placed = [(r.output_error, r) for r in result.rows if r.output_error is not None]
    if not placed:
        return "No map could be compared."
    _, nearest = min(placed, key=itemgetter(0))
    words = f"{_named(nearest)} comes nearest to softmax, with an error of {_error(nearest)}"
    words += _at(nearest)
    uniform = number(result.uniform_error)
    useful = [
        (r.us_per_token, r)
        for error, r in placed
        if r.us_per_token is not None and (uniform is None or error < uniform)
    ]
    if not useful:
        return f"{words}. None beats attending to all keys alike."
    _, fastest = min(useful, key=itemgetter(0))
    if fastest is nearest:
        return f"{words}, and is the fastest that beats attending to all keys alike."
    return (
        f"{words}; the fastest that beats attending to all keys alike is {_named(fastest)}, "
        f"{_error(fastest)}{_at(fastest)}."
    )


def print_comparison(result: MapComparison, console: Console) -> None:
    """The headline and the numbers, by error."""
    from rich.table import Table as Grid

    console.print(printable(headline(result)), markup=False)
    facts = _facts(result)
    console.print(f"{printable(facts['Data'])}; {facts['Size']}\n", markup=False, style="dim")
    grid = Grid(box=None, pad_edge=False)
    found = _table(result)
    for column in found.columns:
        label = column.label.replace("\u00ad", "- ")
        grid.add_column(label, justify="right" if column.numeric else "left")
    grid.columns[1].no_wrap = True
    for row in found.rows:
        style = "bold" if row[0].text == "✓" else ""
        grid.add_row(*(printable(cell.text) for cell in row), style=style)
    console.print(grid)
    console.print(
        "\n✓ nearer than a mean, and no other is nearer and faster. Denominator: the smallest, as "
        "a share of the absolute values it sums: 1 is safe, near 0 is noise.",
        style="dim",
    )
    for name, reason in map_charts.not_compared(result).items():
        console.print(f"{name}: not compared: {printable(reason)}", markup=False, style="yellow")


def print_catalogue(maps: Sequence[MapDescription], d: int, console: Console) -> None:
    """A block a map."""
    from rich.table import Table as Grid

    console.print(f"Feature maps at head width {d}\n", style="bold")
    grid = Grid(box=None, pad_edge=False)
    for label in ("Map", "M", "Properties"):
        grid.add_column(label, overflow="fold", justify="right" if label == "M" else "left")
    for row in maps:
        kind = row.exactness + ("" if row.causal else ", bidirectional only")
        error = "" if row.exactness == "exact" else f"error  {_plain(row.error)}\n"
        grid.add_row(
            f"[bold]{row.map}[/bold]\n[dim]{kind}\n{_sign(row)}[/dim]",
            count(row.features) if row.features else NONE,
            f"[bold]{_plain(row.kernel)}[/bold]\n{error}use    {_plain(row.regime)}\n"
            f"fails  {_plain(row.failure)}\n",
        )
    console.print(grid)


def _plain(words: object) -> str:
    """Without what rich would take for markup."""
    from rich.markup import escape

    return escape(printable(str(words)))


def _sign(row: MapDescription) -> str:
    if row.positive:
        return "features >= 0"
    return "kernel >= 0" if row.kernel_positive else "any"


def _facts(result: MapComparison) -> dict[str, str]:
    size = f"{count(result.length)} tokens, d = {count(result.d)}"
    attention = "causal" if result.causal else "bidirectional"
    return {
        "Data": plain(result.source),
        "Size": f"{size}, {count(result.heads)} heads, {attention}",
        "Attending to all keys alike": f"error {amount(result.uniform_error)}",
        "Seed": f"{plain(result.seed)}, {count(result.draws)} draws of random maps",
    }


def _how_timed(result: MapComparison) -> str:
    return (
        f"Median time of a layer of {count(result.layer_heads)} heads on a whole sequence of "
        f"{count(result.length)} tokens, exported and run in ONNX Runtime, all maps in turns."
    )


def _how_judged(result: MapComparison) -> str:
    return (
        "Relative difference from softmax attention over tokens and heads, in float64; of random "
        f"maps the root mean square of {count(result.draws)} draws. A model that is trained "
        "with a map does not need softmax's output: then error says little, and time all."
    )


def _table(result: MapComparison) -> Table:
    labels = ["", "Map", "#M", "#Output error", "#Kernel error", "#Theory"]
    labels += ["#Denom\u00adinator", "#µs / token", "#KB / token", "#State, KB"]
    rows = [r for r in result.rows if r.state_bytes is not None]
    rows.sort(key=lambda r: (r.output_error is None, r.output_error or 0.0))
    found = make_table("Measured", labels, [_row(r) for r in rows])
    return found or Table("Measured", tables.headings(*labels), ())


def _row(row: MapRow) -> list[Cell]:
    predicted = row.kernel_error_predicted
    return [
        Cell("✓" if row.frontier else "", tone="good" if row.frontier else "fixed"),
        Cell(str(row.map), tone="fixed strong" if row.frontier else "fixed"),
        Cell(count(row.features)),
        Cell(_tiny(row.output_error), plain(row.reason) if row.reason else ""),
        Cell(_tiny(row.kernel_error)),
        Cell(NONE if predicted is None else _tiny(predicted)),
        Cell(_tiny(row.cancellation)),
        Cell(_or_none(row.us_per_token)),
        Cell(NONE if row.bytes_per_token is None else amount(row.bytes_per_token / 1024)),
        Cell(NONE if row.state_bytes is None else amount(row.state_bytes / 1024)),
    ]


def _not_compared(result: MapComparison) -> Table | None:
    found = map_charts.not_compared(result)
    rows = [[Cell(name, tone="fixed"), Cell(reason)] for name, reason in found.items()]
    return make_table("Not compared", ["Map", "Why"], rows)


def _described(result: MapComparison) -> Table | None:
    rows = [
        [
            Cell(str(m.map), tone="fixed strong"),
            Cell(str(m.kernel), f"{m.exactness}; {_sign(m)}"),
            Cell(str(m.regime)),
            Cell(str(m.failure)),
        ]
        for m in result.maps
    ]
    return make_table("Maps", ["Map", "Kernel", "When to use it", "How it fails"], rows)


def _named(row: MapRow) -> str:
    return f"{row.map} (M = {count(row.features)})"


def _error(row: MapRow) -> str:
    return _tiny(row.output_error)


def _at(row: MapRow) -> str:
    took = number(row.us_per_token)
    return "" if took is None else f" at {amount(took)} µs a token"


def _or_none(value: object) -> str:
    return NONE if number(value) is None else amount(value)


def _tiny(value: object) -> str:
    """Three digits, or one and a power of ten where they would be zeros."""
    found = number(value)
    if found is None:
        return NONE
    if found == 0 or 1e-3 <= found < 1e4:
        return amount(found)
    return "0" if found < 1e-9 else f"{found:.0e}"
