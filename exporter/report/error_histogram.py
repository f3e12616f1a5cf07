"""Counts of output elements by relative error -> a chart with the tolerance as a line.

Every conversion has one, so that it is written as SVG without matplotlib, whose import and layout
take as long as a tenth of the conversion of a small model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from linexport.report.axis_ticks import power_of_ten, short
from linexport.report.figures import FONT_SIZE, NARROW, TITLE_PAD, describe
from linexport.report.text import count

LEAST_BAR = 0.015
"""Share of the tallest bar: one element among millions must still be seen."""
LEAST_DECADES = 3.0
TOP, BOTTOM, RIGHT = 28, 43, 12
"""Margins of the plot in CSS pixels; the left one is as wide as the numbers there."""
CHARACTER = 7.6
"""Width of a digit in CSS pixels, at most."""
MOST_COUNTS = 4
"""Numbers above 0 on the axis of counts, at most."""

Bin = tuple[float, float, float]
"""Both edges and the count."""


@dataclass(frozen=True)
class _Plot:
    """The area of the bars: its edges in CSS pixels, what they stand for, and ticks."""

    left: float
    right: float
    bottom: float
    low: float
    high: float
    largest: float
    counts: Sequence[float]

    def x(self, power: float) -> float:
        """Return the place of a log10 of the error."""
        return self.left + (power - self.low) / (self.high - self.low) * (self.right - self.left)

    def y(self, number: float) -> float:
        return self.bottom - number / self.largest * (self.bottom - TOP)


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
    height = 260 if width < NARROW else 300
    plot = _plot(bins, limit, width, height)
    root = Element("svg", {"viewBox": f"0 0 {width} {height}"})
    _count_axis(root, plot)
    _bars(root, plot, bins, limit, ident)
    _error_axis(root, plot, 6 if width < NARROW else 14)
    if limit:
        _tolerance_line(root, plot, limit)
    words = "How many output elements have which error. The table below has the numbers."
    describe(root, ident, "Distribution of errors", words)
    return tostring(root, encoding="unicode")


def _plot(bins: Sequence[Bin], limit: float | None, width: int, height: int) -> _Plot:
    """Return an area that shows all bins and the tolerance, over some decades at least."""
    ends = [bins[0][0], bins[-1][1], *([math.log10(limit)] if limit else [])]
    low, high = min(ends) - 0.25, max(ends) + 0.25
    lacking = max(0.0, LEAST_DECADES - (high - low)) / 2
    tallest = max(number for _, _, number in bins)
    ticks = _round_counts(tallest)
    left = CHARACTER * max(len(short(tick)) for tick in ticks) + 6
    edges = (low - lacking, high + lacking, 1.05 * tallest)
    return _Plot(left, width - RIGHT, height - BOTTOM, *edges, ticks)


def _round_counts(tallest: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, from 0 to at most the tallest bar."""
    power = 10 ** max(0, math.floor(math.log10(tallest / MOST_COUNTS)))
    step = next(d * power for d in (1, 2, 5, 10) if tallest <= (MOST_COUNTS + 1) * d * power)
    return [step * at for at in range(math.floor(tallest / step) + 1)][: MOST_COUNTS + 1]


def _count_axis(root: Element, plot: _Plot) -> None:
    """Draw a line across the plot for each number, and the name of the axis above."""
    for number in plot.counts:
        y = plot.y(number)
        _line(root, (plot.left, y), (plot.right, y), "stroke: var(--rule)")
        _text(root, (plot.left - 4, y + FONT_SIZE / 3), short(number), "end")
    _text(root, (plot.left, TOP - TITLE_PAD), "elements", "start")


def _error_axis(root: Element, plot: _Plot, most: int) -> None:
    powers = range(math.ceil(plot.low), math.floor(plot.high) + 1)
    for power in powers[:: math.ceil(len(powers) / most)]:
        x = plot.x(power)
        _line(root, (x, plot.bottom), (x, plot.bottom + 3.5), "stroke: var(--rule)")
        _text(root, (x, plot.bottom + 17), power_of_ten(power), "middle")
    middle = (plot.left + plot.right) / 2
    _text(root, (middle, plot.bottom + 34), "relative error", "middle")


def _bars(root: Element, plot: _Plot, bins: Sequence[Bin], limit: float | None, ident: str) -> None:
    """Draw a bar for each bin; those beyond the tolerance in the colour of failures."""
    tallest = max(number for _, _, number in bins)
    for at, (start, end, number) in enumerate(bins):
        over = limit is not None and start >= math.log10(limit)
        group = SubElement(root, "g", {"id": f"{ident}-bin-{at}"})
        words = f"{10**start:.1e} to {10**end:.1e}: {count(number)}"
        SubElement(group, "title").text = words
        left, right = plot.x(start), plot.x(end)
        top = plot.y(max(number, LEAST_BAR * tallest))
        corners = [(left, plot.bottom), (right, plot.bottom), (right, top), (left, top)]
        colour = "bad" if over else "s0"
        style = f"fill: var(--{colour}); stroke: var(--paper); stroke-width: 0.75"
        SubElement(group, "path", {"d": f"{_path(corners)} z", "style": style})


def _tolerance_line(root: Element, plot: _Plot, limit: float) -> None:
    power = math.log10(limit)
    x, in_right_half = plot.x(power), 2 * power > plot.low + plot.high
    style = "stroke-dasharray: 4,3; stroke: var(--ink)"
    _line(root, (x, plot.bottom), (x, TOP), style)
    place = (x if in_right_half else x - 7, TOP - TITLE_PAD)
    words = f"relative tolerance {limit:.1e}"
    text = _text(root, place, words, "end" if in_right_half else "start")
    text.attrib["style"] = f"font-weight: 700; {text.attrib['style']}".replace("soft", "ink")


def _line(root: Element, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    SubElement(root, "path", {"d": _path([start, end]), "style": f"fill: none; {style}"})


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M " + " L ".join(f"{x:.2f} {y:.2f}" for x, y in points)


def _text(root: Element, place: tuple[float, float], words: str, anchor: str) -> Element:
    style = f"font-size: {FONT_SIZE}px; text-anchor: {anchor}; fill: var(--soft)"
    text = SubElement(
        root, "text", {"style": style, "x": f"{place[0]:.2f}", "y": f"{place[1]:.2f}"}
    )
    text.text = words
    return text
