"""Measurements -> SVG drawings, as text that a page can hold inline.

Colours are named by class and given by the page, so that one drawing serves light and dark; each
series also has its own marker, so that none depends on colour. Lines are drawn on logarithmic axes:
a straight line of slope one is time linear in length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from linexport.report.scales import (
    Scale,
    decades,
    linear_scale,
    log_scale,
    octaves,
    power_of_ten,
    round_steps,
    short,
    spread,
)
from linexport.report.svg import document, line, text
from linexport.report.text import amount, count

LABEL_GAP = 17.0
LEAST_DECADES = 3.0
LEFT = 44.0
NARROW = 500
MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5L5.5,0L0,5.5L-5.5,0z",
)


@dataclass(frozen=True)
class Point:
    """One measured length: the median and, where known, the ninetieth percentile."""

    x: float
    p50: float
    p90: float | None = None


@dataclass(frozen=True)
class Series:
    """One competitor."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class _Plot:
    """Where a chart draws: its scales, its right and lower edges, every measured length."""

    x: Scale
    y: Scale
    right: float
    floor: float
    lengths: tuple[float, ...]


def latency_chart(series: Sequence[Series], ident: str, width: int = 960) -> str:
    """Milliseconds over length; see ``length_chart``."""
    return length_chart(series, ident, width, "ms a call", "Latency by sequence length")


def length_chart(
    series: Sequence[Series], ident: str, width: int, vertical: str, title: str
) -> str:
    """A quantity over length, one line a series, labelled at its end; "" without points."""
    drawn = [(style, one) for style, one in enumerate(series) if one.points]
    points = [point for _, one in drawn for point in one.points]
    if not points:
        return ""
    narrow = width < NARROW
    height, right = (320, width - 92) if narrow else (400, width - 116)
    lengths = sorted({point.x for point in points})
    values = [value for point in points for value in (point.p50, point.p90) if value]
    low_x, high_x, ticks_x = octaves(lengths, 4 if narrow else 9)
    low_y, high_y, ticks_y = decades(values, 8)
    floor = height - 46.0
    x = log_scale(low_x, high_x, LEFT, float(right))
    y = log_scale(low_y, high_y, floor, 30.0)
    plot = _Plot(x, y, float(right), floor, tuple(lengths))

    parts = _axes(plot, vertical, "sequence length in tokens", [(y(t), t) for t in ticks_y])
    for tick in ticks_x:
        parts.append(line(x(tick), floor, x(tick), floor + 5, "grid"))
        parts.append(text(x(tick), floor + 20, count(tick), "tick middle"))
    # Emphasis last: the artifact, the first series, lies on top of the others.
    for style, one in reversed(drawn):
        parts += _curve(one, style, plot)
    parts += _end_labels(drawn, plot)
    names = ", ".join(one.name for _, one in drawn)
    what = f"{title} for {names}, in {vertical}. The table below has the numbers."
    return document(ident, title, what, width, height, parts)


def _axes(
    plot: _Plot, vertical: str, horizontal: str, ticks: Sequence[tuple[float, float]]
) -> list[str]:
    """Titles of both axes and a labelled grid line for each (position, value)."""
    parts = [text(0, 12, vertical, "axis")]
    parts.append(text((LEFT + plot.right) / 2, plot.floor + 42, horizontal, "axis middle"))
    for place, value in ticks:
        parts.append(line(LEFT, place, plot.right, place, "grid"))
        parts.append(text(LEFT - 8, place + 4, short(value), "tick end"))
    return parts


def _curve(one: Series, style: int, plot: _Plot) -> list[str]:
    parts = []
    for run in _unbroken_runs(one.points, plot.lengths):
        corners = " ".join(f"{plot.x(point.x):.1f},{plot.y(point.p50):.1f}" for point in run)
        parts.append(f'<polyline class="line s{style}" points="{corners}"/>')
    return parts + [_mark(point, one.name, style, plot) for point in one.points]


def _end_labels(drawn: Sequence[tuple[int, Series]], plot: _Plot) -> list[str]:
    """Names beside the ends of the lines, with a dotted lead where one had to move away."""
    parts = []
    ends = [plot.y(one.points[-1].p50) for _, one in drawn]
    places = spread(ends, LABEL_GAP, 34.0, plot.floor - 4)
    for (style, one), end, place in zip(drawn, ends, places, strict=True):
        last = one.points[-1].x
        away = plot.right - plot.x(last) > 40 or last < plot.lengths[-1]
        if away or abs(place - end) > 3:
            parts.append(line(plot.x(last) + 8, end, plot.right + 6, place, "leader"))
        parts.append(text(plot.right + 10, place + 4, one.name, f"label t{style}"))
    return parts


def _unbroken_runs(points: Sequence[Point], lengths: Sequence[float]) -> list[list[Point]]:
    """The points in groups without a length between them that only others were measured at."""
    runs: list[list[Point]] = []
    for point in points:
        index = lengths.index(point.x)
        if not (runs and index and runs[-1][-1].x == lengths[index - 1]):
            runs.append([])
        runs[-1].append(point)
    return runs


def _mark(point: Point, name: str, style: int, plot: _Plot) -> str:
    left, top = plot.x(point.x), plot.y(point.p50)
    whisker, tail = "", ""
    if point.p90 is not None:
        high = plot.y(point.p90)
        whisker = line(left, top, left, high, f"whisker s{style}")
        whisker += line(left - 4, high, left + 4, high, f"whisker s{style}")
        tail = f", p90 {amount(point.p90)} ms"
    tip = escape(f"{name}, {count(point.x)} tokens: p50 {amount(point.p50)} ms{tail}")
    place = f'transform="translate({left:.1f},{top:.1f})"'
    marker = f'<path class="marker f{style}" d="{MARKERS[style % len(MARKERS)]}" {place}/>'
    return f"<g><title>{tip}</title>{whisker}{marker}</g>"


def error_histogram(
    edges: Sequence[float],
    counts: Sequence[float],
    limit: float | None,
    ident: str,
    width: int = 960,
) -> str:
    """Bars of counts between edges, which are log10 of the error; the limit is a vertical line.

    Empty bins at both ends are left out. "" where there is nothing to draw.
    """
    filled = [index for index, much in enumerate(counts) if much > 0]
    if not filled or len(edges) != len(counts) + 1:
        return ""
    height, right = (260 if width < NARROW else 300), width - 8.0
    floor = height - 46.0
    mark = math.log10(limit) if limit else None
    low, high = _span(edges[filled[0]], edges[filled[-1] + 1], mark)
    ticks = round_steps(max(counts))
    x = linear_scale(low, high, LEFT, right)
    y = linear_scale(0.0, ticks[-1], floor, 34.0)
    plot = _Plot(x, y, right, floor, ())

    parts = _axes(plot, "elements", "relative error", [(y(tick), tick) for tick in ticks])
    exponents = range(math.ceil(low), math.floor(high) + 1)
    for exponent in exponents[:: math.ceil(len(exponents) / (6 if width < NARROW else 14))]:
        parts.append(text(x(exponent), floor + 20, power_of_ten(exponent), "tick middle"))
    for index in filled:
        over = mark is not None and edges[index] >= mark
        parts.append(_bar(edges[index], edges[index + 1], counts[index], over, plot))
    if limit and mark is not None:
        side, shift = ("end", -7) if x(mark) > (LEFT + right) / 2 else ("start", 7)
        parts.append(line(x(mark), 20, x(mark), floor, "limit"))
        words = f"relative tolerance {limit:.1e}"
        parts.append(text(x(mark) + shift, 27, words, f"label {side}"))
    what = "How many output elements have which error. The table below has the numbers."
    return document(ident, "Distribution of errors", what, width, height, parts)


def _span(first: float, last: float, mark: float | None) -> tuple[float, float]:
    """Limits around the bars and the tolerance, of at least so many decades."""
    low = min(first, first if mark is None else mark) - 0.25
    high = max(last, last if mark is None else mark) + 0.25
    lacking = max(0.0, LEAST_DECADES - (high - low)) / 2
    return low - lacking, high + lacking


def _bar(start: float, end: float, much: float, over: bool, plot: _Plot) -> str:
    left, right = plot.x(start), plot.x(end)
    # A bin with a single element among millions must still be seen.
    tall = max(2.0, plot.floor - plot.y(much))
    place = f'x="{left + 0.75:.1f}" y="{plot.floor - tall:.1f}"'
    size = f'width="{max(1.0, right - left - 1.5):.1f}" height="{tall:.1f}"'
    tip = f"{10**start:.1e} to {10**end:.1e}: {count(much)}"
    style = "bar over" if over else "bar"
    return f'<rect class="{style}" {place} {size}><title>{tip}</title></rect>'
