"""Measurements -> a chart over sequence length, one line a series.

Both axes are logarithmic: a straight line of slope one is linear in the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from linexport.report.text import amount, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One measured length: the median and, where known, the ninetieth percentile."""

    x: float
    p50: float
    p90: float | None = None


@dataclass(frozen=True)
class Series:
    """The measurements of the artifact or of one baseline, in order of length."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Quantity:
    """A measured quantity: the chart's title, the axis label, the unit in tooltips.

    Attributes:
        over: title of the other axis.
        counted: what it counts.
    """

    title: str
    label: str
    unit: str
    over: str = "sequence length in tokens"
    counted: str = "tokens"


LATENCY = Quantity("Latency by sequence length", "ms a call", "ms")
MEMORY = Quantity("Memory by sequence length", "peak MB of a call", "MB")


def length_chart(series: Sequence[Series], quantity: Quantity, ident: str, width: int = 960) -> str:
    """Return the chart as an SVG element; "" without points."""
    drawn = [(index, one) for index, one in enumerate(series) if one.points]
    if not drawn:
        return ""
    with chart_style():
        figure = new_figure(width, 340 if width < NARROW else 400)
        axes = titled_axes(figure, quantity.label, quantity.over)
        lengths = sorted({point.x for _, one in drawn for point in one.points})
        # Emphasis last: the artifact, the first series, lies on top of the others.
        for index, one in reversed(drawn):
            _curve(axes, one, index, lengths)
        points = [point for _, one in drawn for point in one.points]
        octave_axis(axes, lengths, 4 if width < NARROW else 9)
        decade_axis(axes, "y", [v for p in points for v in (p.p50, p.p90) if v], 8)
        _legend(figure, axes, [one for _, one in drawn], width)
        names = ", ".join(one.name for _, one in drawn)
        return inline_svg(
            Chart(
                figure,
                quantity.title,
                f"{quantity.title} for {names}: {quantity.label}. The table below has the numbers.",
                {_gid(index): _tooltips(one, quantity) for index, one in drawn},
            ),
            ident,
        )


def _curve(axes: Axes, one: Series, index: int, lengths: Sequence[float]) -> None:
    """Draw markers, whiskers up to p90, and a line that breaks where only others were measured."""
    measured = {point.x: point for point in one.points}
    medians = [measured[x].p50 if x in measured else math.nan for x in lengths]
    colour = series_colour(index)
    style: Style = {"color": colour, "zorder": 3 - index / 10}
    axes.plot(lengths, medians, linewidth=2 if index else 3, **style)
    whiskers = [(p.x, p.p50, max(p.p90 - p.p50, 0.0)) for p in one.points if p.p90 is not None]
    if whiskers:
        x, low, up = zip(*whiskers, strict=True)
        axes.errorbar(x, low, ([0.0] * len(up), up), fmt="none", capsize=4, elinewidth=1, **style)
    axes.plot(
        [point.x for point in one.points],
        [point.p50 for point in one.points],
        **(style | POINT),
        marker=MARKERS[index],
        markeredgecolor=palette()["paper"],
        linestyle="none",
        label=one.name,
        gid=_gid(index),
    )


def _legend(figure: Figure, axes: Axes, drawn: Sequence[Series], width: int) -> None:
    """Name the series right of the chart, in the order of their last points; above if narrow."""
    handles, names = axes.get_legend_handles_labels()
    order = sorted(drawn, key=lambda one: one.points[-1].p50, reverse=True)
    found = dict(zip(names, handles, strict=True))
    place = (
        {"loc": "outside upper left", "ncols": 2}
        if width < NARROW
        else {"loc": "outside right center"}
    )
    figure.legend([found[one.name] for one in order], [one.name for one in order], **place)


def _tooltips(one: Series, quantity: Quantity) -> list[str]:
    return [
        f"{one.name}, {count(point.x)} {quantity.counted}: {_amounts(point, quantity.unit)}"
        for point in one.points
    ]


def _amounts(point: Point, unit: str) -> str:
    if point.p90 is None:
        return f"{amount(point.p50)} {unit}"
    return f"p50 {amount(point.p50)} {unit}, p90 {amount(point.p90)} {unit}"


def _gid(index: int) -> str:
    return f"series-{index}"
