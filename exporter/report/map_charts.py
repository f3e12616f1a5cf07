"""A comparison of feature maps -> two drawings of its error, over features and over time.

One line a map through its numbers of features. Its family gives colour and marker; a hollow marker
warns that the denominator can change sign. Errors above ``CEILING`` are off the chart and listed
below it. Over time, a dashed staircase joins the maps that nothing else beats in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import Any

from linexport.report.labels import Box, along, place
from linexport.report.scales import Scale, decades, log_scale, octaves, short
from linexport.report.svg import document, line, text
from linexport.report.text import amount, count, items, mapping, objects, positive

CEILING = 2.0
LEFT, TOP, NARROW = 44.0, 66.0, 500
BELOW = 46.0
LEAST_LEAD = 13.0
MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5L5.5,0L0,5.5L-5.5,0z",
    "M0,-5L5,4H-5z",
)
FAMILIES = ("random", "exact kernel of q.k", "exact, positive features", "fitted")
"""By the number of their colour."""


@dataclass(frozen=True)
class Dot:
    """One map at one number of features."""

    name: str
    style: int
    x: float
    error: float
    features: float
    hollow: bool
    frontier: bool


def family(row: Mapping[str, Any]) -> int:
    """Index into ``FAMILIES``."""
    if row.get("exactness") == "unbiased":
        return 0
    if row.get("exactness") == "fitted":
        return 3
    return 2 if row.get("positive") else 1


def error_by_features(result: Mapping[str, Any], ident: str, width: int = 960) -> str:
    """The drawing over M; "" without points."""
    dots = _dots(result, "features")
    return _draw(result, dots, "features M", "Output error by number of features", ident, width)


def error_by_time(result: Mapping[str, Any], ident: str, width: int = 960) -> str:
    """The drawing over microseconds a token; "" without points."""
    dots = _dots(result, "us_per_token")
    label = f"µs a token, a layer of {count(result.get('layer_heads'))} heads"
    return _draw(result, dots, label, "Output error by time", ident, width, frontier=True)


def _dots(result: Mapping[str, Any], key: str) -> list[Dot]:
    found = []
    for row in objects(result.get("rows")):
        x, error = positive(row.get(key)), positive(row.get("output_error"))
        features = positive(row.get("features"))
        if x is not None and error is not None and features is not None:
            hollow = not (row.get("positive") or row.get("map") in ("taylor2", "quadratic"))
            found.append(
                Dot(
                    str(row.get("map")),
                    family(row),
                    x,
                    error,
                    features,
                    hollow,
                    bool(row.get("frontier")),
                )
            )
    return found


def _draw(
    result: Mapping[str, Any],
    dots: Sequence[Dot],
    label: str,
    title: str,
    ident: str,
    width: int,
    frontier: bool = False,
) -> str:
    shown = [d for d in dots if d.error <= CEILING]
    if not shown:
        return ""
    narrow = width < NARROW
    beyond = _beyond(dots, 46 if narrow else 130)
    legend = _legend(shown, narrow)
    top = TOP - 26 + 19 * (1 + max(row for _, _, row, _ in legend))
    floor = top + (330.0 if narrow else 420.0)
    height = round(floor + BELOW + 18 * len(beyond) + (14 if beyond else 0))
    uniform = positive(result.get("uniform_error"))
    values = [d.error for d in shown] + ([uniform] if uniform and uniform <= CEILING else [])
    low_y, high_y, ticks_y = decades(values, 9)
    right = float(width - 12)
    low_x, high_x, ticks_x = _horizontal([d.x for d in shown], frontier, 4 if narrow else 9)
    x = log_scale(low_x, high_x, LEFT, right)
    y = log_scale(low_y, high_y, floor, top)

    parts = [text(0, 12, "output error, relative to softmax attention", "axis")]
    parts += [_key(at, row, style, words) for at, words, row, style in legend]
    for tick in ticks_y:
        parts.append(line(LEFT, y(tick), right, y(tick), "grid"))
        parts.append(text(LEFT - 8, y(tick) + 4, short(tick), "tick end"))
    for tick in ticks_x:
        parts.append(line(x(tick), floor, x(tick), floor + 5, "grid"))
        parts.append(text(x(tick), floor + 20, short(tick), "tick middle"))
    parts.append(text((LEFT + right) / 2, floor + 42, label, "axis middle"))
    taken = [Box.around(x(d.x), y(d.error), 12, 12) for d in shown]
    if uniform and low_y <= uniform <= high_y:
        parts.append(line(LEFT, y(uniform), right, y(uniform), "limit"))
        taken += along([(LEFT, y(uniform)), (right, y(uniform))])
        words = (
            "all keys alike" if narrow else "attending to all keys alike: no use above this line"
        )
        parts.append(text(right, y(uniform) - 6, words, "tick end"))
        taken.append(Box.around(right - 3 * len(words), y(uniform) - 8, 6.4 * len(words), 20))
    paths = _lines(shown, x, y)
    if frontier:
        corners = _staircase([d for d in shown if d.frontier], x, y, right)
        paths.insert(0, ("front", corners))
    for style, corners in paths:
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in corners)
        parts.append(f'<polyline class="{style}" points="{points}"/>')
        taken += along(corners)
    parts += [_mark(d, x, y) for d in shown]
    parts += _names(shown, x, y, taken, Box(LEFT + 4, top - 8, right, floor - 4), frontier)
    for at, words in enumerate(beyond):
        parts.append(text(0, floor + BELOW + 18 * (at + 1), words, "tick"))
    names = ", ".join(dict.fromkeys(d.name for d in dots))
    what = f"{title} for {names}. The table below has the numbers."
    return document(ident, title, what, width, height, parts)


def _horizontal(values: Sequence[float], fine: bool, most: int) -> tuple[float, float, list[float]]:
    """Powers of two for features, decades for time."""
    return decades(values, most) if fine else octaves(values, most)


Path = tuple[str, list[tuple[float, float]]]
"""The style of a line, and its corners."""


def _lines(dots: Sequence[Dot], x: Scale, y: Scale) -> list[Path]:
    """A map's points joined in the order of their features."""
    found = []
    for name in dict.fromkeys(d.name for d in dots):
        own = sorted((d for d in dots if d.name == name), key=lambda d: d.features)
        corners = [(x(d.x), y(d.error)) for d in own]
        found.append((f"thin s{own[0].style}", corners))
    return [(style, corners) for style, corners in found if len(corners) > 1]


def _staircase(dots: Sequence[Dot], x: Scale, y: Scale, right: float) -> list[tuple[float, float]]:
    """From each map of the frontier on, the least error that can be had in that time."""
    order = [(x(d.x), y(d.error)) for d in sorted(dots, key=lambda d: d.x)]
    corners = order[:1]
    for before, after in pairwise(order):
        corners += [(after[0], before[1]), after]
    return [*corners, (right, order[-1][1])] if order else []


def _mark(dot: Dot, x: Scale, y: Scale) -> str:
    tip = escape(f"{dot.name}, M = {count(dot.features)}: error {amount(dot.error)}")
    style = f"hollow s{dot.style}" if dot.hollow else f"marker f{dot.style}"
    spot = f'transform="translate({x(dot.x):.1f},{y(dot.error):.1f})"'
    shape = f'<path class="{style}" d="{MARKERS[dot.style]}" {spot}/>'
    return f"<g><title>{tip}</title>{shape}</g>"


def _names(
    dots: Sequence[Dot], x: Scale, y: Scale, taken: list[Box], inside: Box, numbered: bool
) -> list[str]:
    """Each map named once, at its best point, where there is room; a thin line leads to it."""
    found = []
    best = {d.name: d for d in sorted(dots, key=lambda d: -d.error)}
    for dot in sorted(best.values(), key=lambda d: (not d.frontier, d.error)):
        several = sum(d.name == dot.name for d in dots) > 1
        words = f"{dot.name} {count(dot.features)}" if numbered and several else dot.name
        at_x, at_y = x(dot.x), y(dot.error)
        box = place(at_x, at_y, 7.1 * len(words), 15, taken, inside)
        taken.append(box)
        if box.distance(at_x, at_y) > LEAST_LEAD:
            near_x, near_y = box.nearest(at_x, at_y)
            found.append(line(at_x, at_y, near_x, near_y, "lead"))
        weight = "label" if dot.frontier else "name"
        found.append(text(box.left, box.bottom - 3.5, words, f"{weight} t{dot.style}"))
    return found


def _legend(dots: Sequence[Dot], narrow: bool) -> list[tuple[float, str, int, int | None]]:
    """(x, words, row, family or None for the hollow marker) of each entry."""
    present = sorted({d.style for d in dots})
    entries: list[tuple[str, int | None]] = [(FAMILIES[style], style) for style in present]
    if any(d.hollow for d in dots):
        entries.append(("hollow: the denominator can vanish", None))
    found, at, row = [], 8.0, 0
    limit = 320.0 if narrow else 940.0
    for words, style in entries:
        size = 24 + 6.6 * len(words)
        if at > 8 and at + size > limit:
            at, row = 8.0, row + 1
        found.append((at, words, row, style))
        at += size + 14
    return found


def _key(at: float, row: int, style: int | None, words: str) -> str:
    y = 36.0 + 19 * row
    shape = MARKERS[0 if style is None else style]
    look = "hollow s2" if style is None else f"marker f{style}"
    mark = f'<path class="{look}" d="{shape}" transform="translate({at:.1f},{y - 4:.1f})"/>'
    return mark + text(at + 11, y, words, "tick")


def _beyond(dots: Sequence[Dot], width: int) -> list[str]:
    """Maps off the chart, with their errors."""
    far: dict[str, list[float]] = {}
    for dot in dots:
        if dot.error > CEILING:
            far.setdefault(dot.name, []).append(dot.error)
    if not far:
        return []
    named = [
        f"{name} {amount(min(e))}" + (f" to {amount(max(e))}" if len(e) > 1 else "")
        for name, e in far.items()
    ]
    return wrap(f"Off the chart, with an error above {CEILING:g}: {', '.join(named)}.", width)


def refused(result: Mapping[str, Any]) -> dict[str, str]:
    """Maps without a measurement, and why."""
    rows = objects(items(mapping(result).get("rows")))
    return {
        str(r.get("map")): str(r["reason"])
        for r in rows
        if r.get("reason") and r.get("output_error") is None
    }
