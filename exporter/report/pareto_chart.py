"""Choices of bits -> charts of divergence over size, and over time of a decode step.

A line joins what was predicted, filled points were measured, and the chosen one stands out.
"""

from __future__ import annotations

from collections.abc import Sequence

from linexport.manifest.quantisation import ParetoPoint
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
from linexport.report.text import amount, count, error

MEGABYTE = 1e6


def pareto_chart(points: Sequence[ParetoPoint], over: str, ident: str, width: int = 960) -> str:
    """Return the chart as an SVG element; "" where there is nothing to draw.

    Args:
        points: from the smallest choice on.
        over: "bytes" or "step_ms", the quantity of the horizontal axis.
        ident: prefix of identifiers in the element.
        width: of the figure, pixels.
    """
    sized = over == "bytes"
    measured = [(_place(p, over), p.measured, p) for p in points if p.measured and _place(p, over)]
    line = [(_place(p, over), p.predicted) for p in points if sized and p.predicted > 0]
    if not measured or not all(x > 0 for x, *_ in measured):
        return ""
    with chart_style():
        figure = new_figure(width, 300 if width < NARROW else 340)
        label = "MB of quantised weights" if sized else "ms of a decode step"
        axes = titled_axes(figure, "mean divergence in nats", label)
        every = [*line, *((x, y) for x, y, _ in measured)]
        most = 4 if width < NARROW else 8
        decade_axis(axes, "x", [x for x, _ in every], most)
        decade_axis(axes, "y", [y for _, y in every], 6)
        if line:
            axes.plot(*zip(*line, strict=True), color=series_colour(1), linewidth=1.5, marker="")
        tooltips = {}
        for at, (x, y, point) in enumerate(measured):
            colour = palette()["bad"] if point.chosen else series_colour(0)
            marker = "D" if point.chosen else "o"
            axes.plot([x], [y], marker=marker, color=colour, gid=f"point-{at}", **POINT)
            if point.chosen:
                axes.annotate("chosen", (x, y), textcoords="offset points", xytext=(9, 7))
            step = "" if point.step_ms is None else f", {amount(point.step_ms)} ms a step"
            tooltips[f"point-{at}"] = [f"{count(point.bytes)} bytes{step}: {error(y)} nats"]
        name = "Divergence by size" if sized else "Divergence by time of a step"
        words = "Measured points, and the line that was predicted. The table has the numbers."
        return inline_svg(Chart(figure, name, words, tooltips), ident)


def _place(point: ParetoPoint, over: str) -> float:
    return point.bytes / MEGABYTE if over == "bytes" else point.step_ms or 0.0
