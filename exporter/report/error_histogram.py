"""Counts of output elements by relative error -> a chart with the tolerance as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from linexport.report.axis_ticks import log_axis, power_of_ten, short
from linexport.report.figures import (
    NARROW,
    TITLE_PAD,
    Chart,
    chart_style,
    inline_svg,
    new_figure,
    palette,
    series_colour,
    titled_axes,
)
from linexport.report.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_BAR = 0.015
"""Share of the tallest bar: one element among millions must still be seen."""
LEAST_DECADES = 3.0


def error_histogram(
    edges: Sequence[float],
    counts: Sequence[float],
    limit: float | None,
    ident: str,
    width: int = 960,
) -> str:
    """Return bars of counts between edges, which are log10 of the error, as an SVG element.

    Empty bins at both ends are left out. "" where there is nothing to draw.
    """
    filled = [index for index, number in enumerate(counts) if number > 0]
    if not filled or len(edges) != len(counts) + 1:
        return ""
    bins = [(edges[index], edges[index + 1], counts[index]) for index in filled]
    with chart_style():
        figure = new_figure(width, 260 if width < NARROW else 300)
        axes = titled_axes(figure, "elements", "relative error")
        _error_axis(axes, bins, limit, 6 if width < NARROW else 14)
        _bars(axes, bins, limit)
        if limit:
            _tolerance_line(axes, limit)
        tooltips = {
            f"bin-{at}": [f"{10**start:.1e} to {10**end:.1e}: {count(number)}"]
            for at, (start, end, number) in enumerate(bins)
        }
        words = "How many output elements have which error. The table below has the numbers."
        return inline_svg(Chart(figure, "Distribution of errors", words, tooltips), ident)


Bin = tuple[float, float, float]
"""Both edges and the count."""


def _error_axis(axes: Axes, bins: Sequence[Bin], limit: float | None, most: int) -> None:
    """Show all bins and the tolerance, over some decades at least."""
    ends = [bins[0][0], bins[-1][1], *([math.log10(limit)] if limit else [])]
    low, high = min(ends) - 0.25, max(ends) + 0.25
    lacking = max(0.0, LEAST_DECADES - (high - low)) / 2
    low, high = low - lacking, high + lacking
    powers = range(math.ceil(low), math.floor(high) + 1)
    shown = powers[:: math.ceil(len(powers) / most)]
    log_axis(axes, "x", 10**low, 10**high, {10.0**p: power_of_ten(p) for p in shown})


def _bars(axes: Axes, bins: Sequence[Bin], limit: float | None) -> None:
    """Draw a bar for each bin; those beyond the tolerance in the colour of failures."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    tallest = max(number for _, _, number in bins)
    for at, (start, end, number) in enumerate(bins):
        over = limit is not None and start >= math.log10(limit)
        axes.bar(
            10**start,
            max(number, LEAST_BAR * tallest),
            10**end - 10**start,
            align="edge",
            color=palette()["bad"] if over else series_colour(0),
            edgecolor=palette()["paper"],
            linewidth=0.75,
            gid=f"bin-{at}",
        )
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _tolerance_line(axes: Axes, limit: float) -> None:
    low, high = axes.get_xlim()
    left = limit * limit > low * high
    axes.axvline(limit, color=palette()["ink"], linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"relative tolerance {limit:.1e}",
        (limit, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0 if left else -7, TITLE_PAD),
        textcoords="offset points",
        ha="right" if left else "left",
        va="baseline",
        weight="bold",
    )
