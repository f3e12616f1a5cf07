"""A part of a graph -> an SVG drawing; colours are named by class and given by the page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from linexport.manifest.inspected import DrawnNode, GraphPart
from linexport.report.layers import Placed, place
from linexport.system.escape import html

ROW = 66.0
HEIGHT = 40.0
LEAST, MOST_LETTERS = 84.0, 30
MARGIN = 10.0


@dataclass(frozen=True)
class Drawing:
    """An SVG element, and how wide it is at its natural size."""

    svg: str
    width: float


def drawing(part: GraphPart, ident: str, label: str) -> Drawing:
    """Boxes and curves. Shapes of values are shown when one points at a box."""
    placed = place({n.id: _width(n) for n in part.nodes}, part.edges)
    width = placed.width + 2 * MARGIN
    height = (placed.layers - 1) * ROW + HEIGHT + 2 * MARGIN
    curves = "".join(_curve(placed, start, end) for start, end in placed.bends)
    boxes = "".join(_box(node, placed) for node in part.nodes)
    svg = (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width: {width:.0f}px" role="img" '
        f'aria-labelledby="{html(ident)}"><title id="{html(ident)}">{html(label)}</title>'
        f"{curves}{boxes}</svg>"
    )
    return Drawing(svg, width)


def _width(node: DrawnNode) -> float:
    letters = max(1.14 * len(_cut(node.op)), 0.9 * len(_cut(node.note)))
    return max(LEAST, 7.0 * letters + 26)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"


def _middle(placed: Placed, layer: int) -> float:
    return MARGIN + layer * ROW + HEIGHT / 2


def _curve(placed: Placed, start: str, end: str) -> str:
    """From the foot of one box to the head of another, straight down where it can be."""
    points = [(placed.x[start], _middle(placed, placed.layer[start]) + HEIGHT / 2)]
    points += [(x, _middle(placed, layer)) for x, layer in placed.bends[start, end]]
    points.append((placed.x[end], _middle(placed, placed.layer[end]) - HEIGHT / 2))
    moved = [(x + MARGIN, y) for x, y in points]
    path = f"M{moved[0][0]:.1f},{moved[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(moved):
        half = (y0 + y1) / 2
        path += f"C{x0:.1f},{half:.1f} {x1:.1f},{half:.1f} {x1:.1f},{y1:.1f}"
    return f'<path class="edge" d="{path}"/>'


def _box(node: DrawnNode, placed: Placed) -> str:
    x, y = placed.x[node.id] + MARGIN, _middle(placed, placed.layer[node.id])
    width = _width(node)
    shape = f", {node.shape}" if node.shape else ""
    corner = HEIGHT / 2 if node.role in ("input", "output") else 6
    lines = [("op", _cut(node.op)), *([("note", _cut(node.note))] if node.note else [])]
    first = y + 4.5 - 7.5 * (len(lines) - 1)
    texts = "".join(
        f'<text class="{kind}" x="{x:.1f}" y="{first + 15 * i:.1f}">{html(text)}</text>'
        for i, (kind, text) in enumerate(lines)
    )
    return (
        f'<g class="box {html(node.role)}"><title>{html(node.id + shape)}</title>'
        f'<rect x="{x - width / 2:.1f}" y="{y - HEIGHT / 2:.1f}" width="{width:.1f}" '
        f'height="{HEIGHT:.0f}" rx="{corner:.0f}"/>'
        f"{texts}</g>"
    )
