"""A comparison of feature maps -> charts of its error, over features and over time.

One line a map through its numbers of features. Its family gives colour and marker; a hollow marker
warns that the denominator can change sign. Errors above ``CEILING`` are off the chart. Over time, a
dashed staircase joins the maps that nothing else beats in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from linexport.manifest.map_records import MapComparison, MapRow
from linexport.report.axis_ticks import decade_axis, octave_axis
from linexport.report.figures import (
    MARKERS,
    NARROW,
    POINT,
    Chart,
    Style,
    chart_style,
    inline_svg,
    new_figure,
    palette,
    series_colour,
    titled_axes,
)
from linexport.report.text import amount, count, positive

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Over = Literal["us_per_token", "features"]
"""The quantity of the horizontal axis, as named in the rows of a comparison."""

CEILING = 1.9
EITHER_SIGN = ("taylor2", "quadratic")
"""Maps whose features change sign while their kernel does not."""
FAMILIES = ("random", "exact kernel of q.k", "exact, positive features", "fitted")
"""By the number of their colour."""
DASHED: Style = {"linewidth": 1.2, "dashes": (6, 4)}
DOTTED: Style = {"linewidth": 1.2, "dashes": (1.5, 3)}
FRONTIER = "nothing else is both nearer and faster"
UNIFORM = "attending to all keys alike: no use above"
HOLLOW = "hollow: the denominator can vanish"
TITLES = {"us_per_token": "Output error by time", "features": "Output error by number of features"}
VERTICAL = "output error, relative to softmax attention"


@dataclass(frozen=True)
class Measured:
    """One map at one number of features; ``x`` is the quantity of the horizontal axis."""

    name: str
    family: int
    x: float
    error: float
    features: float
    hollow: bool
    frontier: bool


def error_chart(result: MapComparison, over: Over, ident: str, width: int = 960) -> str:
    """Return the chart as an SVG element; "" without points."""
    with chart_style():
        chart = draw_error(result, over, width)
        return "" if chart is None else inline_svg(chart, ident)


def draw_error(result: MapComparison, over: Over, width: int = 960) -> Chart | None:
    """Draw the chart, within ``chart_style``; None without points."""
    shown = [one for one in measured(result, over) if one.error <= CEILING]
    if not shown:
        return None
    timed, narrow = over == "us_per_token", width < NARROW
    figure = new_figure(width, 640 if narrow else 560)
    label = f"µs a token, a layer of {count(result.layer_heads)} heads"
    axes = titled_axes(figure, VERTICAL, label if timed else "features M")
    uniform = positive(result.uniform_error)
    guides = [uniform] if uniform and uniform <= CEILING else []
    decade_axis(axes, "y", [*(one.error for one in shown), *guides], 9)
    if timed:
        decade_axis(axes, "x", [one.x for one in shown], 4 if narrow else 9)
    else:
        octave_axis(axes, [one.x for one in shown], 4 if narrow else 9)
    lines = _lines(axes, shown)
    if timed:
        lines += _staircase(axes, [one for one in shown if one.frontier])
    for error in guides:
        axes.axhline(error, color=palette()["ink"], label=UNIFORM, **DOTTED)
        lines.append((axes.get_xlim(), (error, error)))
    _marks(axes, shown)
    _legend(figure, axes, shown, narrow)
    _names(axes, shown, lines, numbered=timed)
    names = ", ".join(dict.fromkeys(one.name for one in shown))
    words = f"{TITLES[over]} for {names}. The table below has the numbers."
    return Chart(figure, TITLES[over], words, {_gid(i): [_tip(m)] for i, m in enumerate(shown)})


def measured(result: MapComparison, over: Over) -> list[Measured]:
    """Return the rows of a comparison that a logarithmic chart can show."""
    found = []
    for row in result.rows:
        x, error = positive(getattr(row, over)), positive(row.output_error)
        features = positive(row.features)
        if x is not None and error is not None and features is not None:
            hollow = not (row.positive or row.map in EITHER_SIGN)
            frontier = row.frontier
            name = row.map
            found.append(Measured(name, family(row), x, error, features, hollow, frontier))
    return found


def family(row: MapRow) -> int:
    """Return the row's index into ``FAMILIES``."""
    if row.exactness == "unbiased":
        return 0
    if row.exactness == "fitted":
        return 3
    return 2 if row.positive else 1


def off_chart(result: MapComparison, over: Over) -> str:
    """Return a sentence that lists the maps above ``CEILING`` with their errors; "" if none are."""
    far: dict[str, list[float]] = {}
    for one in measured(result, over):
        if one.error > CEILING:
            far.setdefault(one.name, []).append(one.error)
    named = [
        f"{name} {amount(min(e))}" + (f" to {amount(max(e))}" if len(e) > 1 else "")
        for name, e in far.items()
    ]
    return f"Off the chart, with an error above {CEILING:g}: {', '.join(named)}." if named else ""


def not_compared(result: MapComparison) -> dict[str, str]:
    """Return the maps without a measurement, each with the reason."""
    return {r.map: r.reason for r in result.rows if r.reason and r.output_error is None}


Line = tuple[Sequence[float], Sequence[float]]
"""The x and the y of its corners."""


def _lines(axes: Axes, shown: Sequence[Measured]) -> list[Line]:
    """Join the points of each map in the order of their features."""
    lines: list[Line] = []
    for name in dict.fromkeys(one.name for one in shown):
        own = sorted((one for one in shown if one.name == name), key=lambda one: one.features)
        line = [one.x for one in own], [one.error for one in own]
        axes.plot(*line, color=series_colour(own[0].family), linewidth=1.5, alpha=0.55)
        lines.append(line)
    return lines


def _staircase(axes: Axes, frontier: Sequence[Measured]) -> list[Line]:
    """Draw the least error that can be had within each time."""
    if not frontier:
        return []
    own = sorted(frontier, key=lambda one: one.x)
    ends = [*(one.x for one in own), axes.get_xlim()[1]]
    x = [end for end in ends for _ in range(2)][1:-1]
    y = [one.error for one in own for _ in range(2)]
    axes.plot(x, y, color=palette()["ink"], gid="frontier", label=FRONTIER, **DASHED)
    return [(x, y)]


def _marks(axes: Axes, shown: Sequence[Measured]) -> None:
    for at, one in enumerate(shown):
        colour, paper = series_colour(one.family), palette()["paper"]
        axes.plot(
            one.x,
            one.error,
            marker=MARKERS[one.family],
            markerfacecolor=paper if one.hollow else colour,
            markeredgecolor=colour if one.hollow else paper,
            linestyle="none",
            gid=_gid(at),
            **POINT,
        )


def _legend(figure: Figure, axes: Axes, shown: Sequence[Measured], narrow: bool) -> None:
    """Name families, the hollow marker and the guide lines above the chart."""
    from matplotlib.lines import Line2D

    soft, paper = palette()["soft"], palette()["paper"]
    entries: list[Artist] = [
        Line2D(
            [],
            [],
            marker=MARKERS[index],
            color=series_colour(index),
            markeredgecolor=paper,
            linestyle="none",
            label=FAMILIES[index],
            **POINT,
        )
        for index in sorted({one.family for one in shown})
    ]
    if any(one.hollow for one in shown):
        hollow: Style = {
            "markerfacecolor": paper,
            "markeredgecolor": soft,
            "linestyle": "none",
        }
        entries.append(Line2D([], [], marker=MARKERS[0], label=HOLLOW, **hollow, **POINT))
    entries += axes.get_legend_handles_labels()[0]
    figure.legend(handles=entries, loc="outside upper left", ncols=1 if narrow else 3)


def _names(axes: Axes, shown: Sequence[Measured], lines: Sequence[Line], numbered: bool) -> None:
    """Name each map once, at its best point, where there is room; a thin line leads to it."""
    from textalloc import allocate

    best = {one.name: one for one in sorted(shown, key=lambda one: -one.error)}
    order = sorted(best.values(), key=lambda one: (not one.frontier, one.error))
    allocate(
        axes,
        [one.x for one in order],
        [one.error for one in order],
        [_name(one, shown) if numbered else one.name for one in order],
        x_scatter=[one.x for one in shown],
        y_scatter=[one.error for one in shown],
        x_lines=[x for x, _ in lines],
        y_lines=[y for _, y in lines],
        textsize=axes.xaxis.label.get_fontsize(),
        textcolor=[series_colour(one.family) for one in order],
        fontweight=["bold" if one.frontier else "normal" for one in order],
        linecolor=palette()["soft"],
        linewidth=0.8,
        max_distance=0.5,
        nbr_candidates=1000,
        avoid_label_lines_overlap=True,
    )


def _name(one: Measured, shown: Sequence[Measured]) -> str:
    """Return the map's name, with its features where it was measured with several numbers."""
    several = sum(other.name == one.name for other in shown) > 1
    return f"{one.name} {count(one.features)}" if several else one.name


def _gid(index: int) -> str:
    return f"map-{index}"


def _tip(one: Measured) -> str:
    return f"{one.name}, M = {count(one.features)}: error {amount(one.error)}"
