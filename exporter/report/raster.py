"""Drawings -> a PNG file, by resvg: the same SVG as on the page, its colours written out.

Raises EnvironmentProblemError where the extra ``plot`` is not installed, or where there is no font:
resvg leaves words out then, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources

from linexport.errors import EnvironmentProblemError
from linexport.report.svg import text

MARGIN, GAP, HEAD = 36, 34, 92
ZOOM = 2


def png(title: str, lines: Sequence[str], drawings: Sequence[str]) -> bytes:
    """A sheet with a title, some lines beneath it, and the drawings one below another."""
    check()
    import resvg_py

    sheet = _sheet(title, lines, drawings)
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=sheet, style_sheet=_style(), zoom=ZOOM, background=_colours()["paper"]
        )
    )


def check() -> None:
    """See above."""
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblemError(
            "PNG drawings need resvg-py, which is not installed. Install linexport[plot], or ask "
            "for the HTML page alone."
        ) from error
    if not _has_fonts():
        raise EnvironmentProblemError(
            "This machine has no font to draw words with in a PNG. Install one, such as the "
            "package fonts-dejavu-core, or ask for the HTML page alone."
        )


@cache
def _has_fonts() -> bool:
    """Whether a word leaves a mark."""
    import resvg_py

    def drawn(word: str) -> bytes:
        size = 'xmlns="http://www.w3.org/2000/svg" width="60" height="20"'
        one = f'<svg {size}><text x="2" y="16" font-family="sans-serif">{word}</text></svg>'
        return bytes(resvg_py.svg_to_bytes(svg_string=one))

    return drawn("M") != drawn("")


def _sheet(title: str, lines: Sequence[str], drawings: Sequence[str]) -> str:
    sizes = [_size(drawing) for drawing in drawings]
    width = max(size[0] for size in sizes) + 2 * MARGIN
    parts = [text(MARGIN, 46, title, "title")]
    parts += [text(MARGIN, 72 + 18 * at, words, "tick") for at, words in enumerate(lines)]
    top = HEAD + 18 * len(lines)
    for drawing, (wide, high) in zip(drawings, sizes, strict=True):
        place = f'x="{MARGIN}" y="{top}" width="{wide}" height="{high}"'
        parts.append(drawing.replace("<svg ", f"<svg {place} ", 1))
        top += high + GAP
    root = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" class="chart"'
    return f"<svg {root}><title>{escape(title)}</title>{''.join(parts)}</svg>"


def _size(drawing: str) -> tuple[int, int]:
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing)
    assert found
    return int(found[1]), int(found[2])


def _css() -> str:
    return resources.files("linexport.report").joinpath("style.css").read_text(encoding="utf-8")


def _colours() -> dict[str, str]:
    """The variables of the light page."""
    root = _css().split("}", 1)[0]
    return dict(re.findall(r"--([\w]+): ([^;]+);", root))


def _style() -> str:
    """The rules for charts; resvg knows neither variables nor the shorthand ``font``."""
    rules = [
        rule for rule in _css().splitlines() if rule.startswith(".chart") and "svg" not in rule
    ]
    style = (
        "\n".join(rules)
        + "\n.chart .title { font-size: 22px; font-weight: 600; fill: var(--ink); }"
    )
    style = re.sub(r"font: (\S+) (var\(--sans\))", r"font-size: \1; font-family: \2", style)
    for name, value in _colours().items():
        style = style.replace(f"var(--{name})", value)
    return style
