"""A search for linear forms -> charts of drop over cost, and the tables behind them.

A point is one choice of forms for all layers; the whisker above it ends at the upper bound of its
drop. A dashed line is the drop that was allowed, a diamond the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from linexport.manifest.linearization_records import (
    SOFTMAX,
    AttentionTime,
    SearchPoint,
    SearchRecord,
)
from linexport.report.axis_ticks import decade_axis
from linexport.report.figures import (
    NARROW,
    POINT,
    Chart,
    chart_style,
    inline_svg,
    new_figure,
    palette,
    series_colour,
    titled_axes,
)
from linexport.report.page import drawings
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import amount, count

HIGHEST = 4.0
"""Times the allowed drop, where the charts end: points above are in the table alone."""

NONE = "–"


def search_texts(search: SearchRecord | None) -> dict[str, object]:
    """Return the parts of the page; without a search all are empty."""
    if search is None:
        return {"search": "", "paretos": [], "points": None, "form_costs": None}
    lengths = [row.length for row in search.points[0].times]
    names = [(f"Drop by time at {count(n)} tokens", f"at-{n}", at) for at, n in enumerate(lengths)]
    drawn = [
        (title, drawings(partial(_chart, search, title, at), f"search-{ident}"))
        for title, ident, at in names
    ]
    if search.points[0].state_bytes:
        title = f"Drop by bytes of states at {count(max(lengths))} tokens"
        drawn.append((title, drawings(partial(_chart, search, title, None), "search-bytes")))
    return {
        "search": _words(search),
        "paretos": [(title, charts) for title, charts in drawn if charts],
        "points": _points(search),
        "form_costs": _costs(search),
    }


def _words(search: SearchRecord) -> str:
    """How it was searched, in a paragraph."""
    repeated = ""
    if search.repeated_rows:
        repeated = f" {count(search.repeated_rows)} rows equal to others were left out."
    resumed = f", {count(search.resumed)} of them on record" if search.resumed else ""
    end = "which used it up" if search.exhausted else "which was enough"
    return (
        f"Of {count(search.fit_rows + search.search_rows + search.confirm_rows)} distinct rows, "
        f"{count(search.fit_rows)} were trained on, {count(search.search_rows)} chose, and "
        f"{count(search.confirm_rows)} confirmed the result.{repeated} {count(search.measured)} "
        f"choices were measured{resumed}, in {amount(search.seconds)} seconds of a budget of "
        f"{search.minutes:g} minutes, {end}."
    )


def _chart(search: SearchRecord, title: str, at: int | None, ident: str, width: int) -> str:
    """Draw drops over the time at one length, by its place, or over bytes."""
    shown = [p for p in search.points if p.drop <= HIGHEST * search.max_drop and _x(p, at) > 0]
    if len(shown) < 2:
        return ""
    with chart_style():
        figure = new_figure(width, 300 if width < NARROW else 340)
        label = "MB of states" if at is None else "ms of attention in all layers"
        axes = titled_axes(figure, f"drop in {search.loss}", label)
        decade_axis(axes, "x", [_x(point, at) for point in shown], 4 if width < NARROW else 8)
        bounds = [min(point.bound, HIGHEST * search.max_drop) for point in shown]
        lowest = min(0.0, *(point.drop for point in shown))
        top = 1.1 * max(search.max_drop, *bounds)
        axes.set_ylim(lowest - 0.05 * (top - lowest), top)
        axes.axhline(search.max_drop, color=palette()["bad"], linewidth=1, linestyle="--")
        tooltips = {}
        for place, (point, bound) in enumerate(zip(shown, bounds, strict=True)):
            colour = palette()["bad"] if point.chosen else series_colour(1 if point.steps else 0)
            marker, gid = "D" if point.chosen else "o", f"point-{place}"
            x = _x(point, at)
            axes.plot([x, x], [point.drop, max(bound, point.drop)], color=colour, linewidth=1)
            axes.plot([x], [point.drop], marker=marker, color=colour, gid=gid, **POINT)
            tooltips[gid] = [_tooltip(point, at)]
        words = f"{title}: each point is a choice of forms. The table below has the numbers."
        return inline_svg(Chart(figure, title, words, tooltips), ident)


def _x(point: SearchPoint, at: int | None) -> float:
    return point.state_bytes / 1e6 if at is None else point.times[at].milliseconds


def _tooltip(point: SearchPoint, at: int | None) -> str:
    cost = f"{count(point.state_bytes)} bytes" if at is None else _time(point.times[at])
    return f"{_forms(point.forms)}: {cost}, drop {point.drop:.3g}, at most {point.bound:.3g}"


def _forms(forms: Sequence[str]) -> str:
    """Forms of all layers, equal neighbours counted."""
    found: list[list[str]] = []
    for form in forms:
        if found and found[-1][0] == form:
            found[-1].append(form)
        else:
            found.append([form])
    return ", ".join(f"{len(same)} × {same[0]}" if len(same) > 1 else same[0] for same in found)


def _time(row: AttentionTime) -> str:
    return f"{amount(row.milliseconds)} ms{', computed' if row.computed else ''}"


def _points(search: SearchRecord) -> Table | None:
    rows = []
    for point in search.points:
        tone = "strong" if point.chosen else ""
        trained = f"{count(point.steps)} steps of fine-tuning" if point.steps else ""
        within = "good" if point.bound <= search.max_drop else ""
        linear = sum(form != SOFTMAX for form in point.forms)
        rows.append(
            [
                Cell(count(linear), "the result" if point.chosen else "", tone=tone),
                Cell(_forms(point.forms), trained),
                Cell(f"{point.drop:.3g}"),
                Cell(f"{point.bound:.3g}", tone=within),
                *(
                    Cell(amount(t.milliseconds), "computed" if t.computed else "")
                    for t in point.times
                ),
                Cell(count(point.state_bytes) if point.state_bytes else NONE),
            ]
        )
    labels = ["#Linear", "Forms, by layer", "#Drop", "#At most"]
    labels += [f"#ms at {count(row.length)}" for row in search.points[0].times]
    return make_table("Choices that were judged", [*labels, "#Bytes of states"], rows)


def _costs(search: SearchRecord) -> Table | None:
    longest = max(row.length for row in search.points[0].times)
    rows = []
    for one in search.costs:
        if one.cost is None:
            rows.append([Cell(one.form, one.reason or "", span=3 + len(search.points[0].times))])
            continue
        cells = [
            Cell(amount(t.milliseconds), "computed" if t.computed else "") for t in one.cost.times
        ]
        held = one.cost.bytes_at(longest)
        rows.append([Cell(one.form), Cell(one.shape), *cells, Cell(count(held) if held else NONE)])
    labels = [f"#ms at {count(row.length)}" for row in search.points[0].times]
    return make_table("One call of attention", ["Form", "Layer", *labels, "#Bytes of state"], rows)
