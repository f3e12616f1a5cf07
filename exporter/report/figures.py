"""matplotlib figures -> drawings that a page holds inline, and PNG pictures.

Figures are drawn in the light palette of style.css. In a drawing for a page, each of these colours
becomes its CSS variable, so that one SVG serves light and dark. Text is text, set in the page's
font. matplotlib is imported on the first drawing, never with this package's command line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^")
NARROW = 500
"""Widths below this are for a phone: fewer ticks, shorter words."""
PIXELS_PER_INCH = 72
Style = dict[str, Any]
"""Keyword arguments of Matplotlib for a line or a point."""

POINT: Style = {"markersize": 9, "markeredgewidth": 1.5, "clip_on": False}
WIDTHS = {"wide": 960, "narrow": 340}
TITLE_PAD = 12
FONT_SIZE = 13
ZOOM, MARGIN, HEAD, LINE = 2, 36, 44, 20
"""Measures of a PNG sheet: device pixels a CSS pixel, and lengths in CSS pixels."""


@dataclass(frozen=True)
class Chart:
    """A drawn figure, its description, and tooltips for the marks of the artists named by gid."""

    figure: Figure
    title: str
    description: str
    tooltips: Mapping[str, Sequence[str]] = field(default_factory=dict)


@cache
def palette() -> Mapping[str, str]:
    """Return the light colours of the style sheet by the name of their variable."""
    style = resources.files("linexport.report").joinpath("style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", style.split("}", 1)[0]))


def series_colour(index: int) -> str:
    """Return the colour of the series with this index; there are four."""
    return palette()[f"s{index}"]


@contextmanager
def chart_style() -> Iterator[None]:
    """Apply this report's matplotlib settings, and none of the user's, within the block."""
    from matplotlib import style

    ink, soft, rule, paper = (palette()[name] for name in ("ink", "soft", "rule", "paper"))
    settings = {
        "axes.axisbelow": True,
        "axes.edgecolor": rule,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": soft,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": soft,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.facecolor": paper,
        "figure.constrained_layout.h_pad": 0.08,
        "figure.constrained_layout.use": True,
        "font.size": FONT_SIZE,
        "grid.color": rule,
        "grid.linewidth": 1,
        "legend.borderpad": 0,
        "legend.columnspacing": 1.5,
        "legend.frameon": False,
        "legend.handlelength": 1.4,
        "legend.handletextpad": 0.5,
        "legend.labelcolor": ink,
        "svg.fonttype": "none",
        "svg.hashsalt": "linexport",
        "text.color": ink,
        "text.parse_math": False,
        "xtick.color": rule,
        "xtick.labelcolor": soft,
        "ytick.color": rule,
        "ytick.labelcolor": soft,
        "ytick.major.size": 0,
    }
    with style.context(["default", settings]):
        yield


def new_figure(width: int, height: int) -> Figure:
    """Return an empty figure of this size in CSS pixels."""
    from matplotlib.figure import Figure

    return Figure((width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), dpi=PIXELS_PER_INCH)


def titled_axes(figure: Figure, vertical: str, horizontal: str) -> Axes:
    """Return axes named above on the left and below."""
    axes = figure.add_subplot()
    axes.set_title(vertical, pad=TITLE_PAD)
    axes.set_xlabel(horizontal)
    return axes


def inline_svg(chart: Chart, ident: str) -> str:
    """Return the chart as one SVG element whose ids begin with ``ident``."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    chart.figure.patch.set_visible(False)
    buffer = io.BytesIO()
    FigureCanvasSVG(chart.figure).print_svg(buffer)  # savefig draws twice, the same
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        _localise(element)
    _remove(root, ("metadata", "style", "clipPath"))
    for group in root.iter("g"):
        _add_tooltips(group, chart.tooltips.get(group.get("id", ""), ()))
    _prefix_ids(root, ident)
    root.attrib = {"viewBox": root.attrib["viewBox"]}
    describe(root, ident, chart.title, chart.description)
    return _themed(ElementTree.tostring(root, encoding="unicode"))


def describe(root: ElementTree.Element, ident: str, title: str, description: str) -> None:
    """Have a drawing read out as a picture of this title and description."""
    root.attrib |= {"role": "img", "aria-labelledby": f"{ident}-title {ident}-description"}
    for at, (tag, suffix, words) in enumerate(
        [("title", "title", title), ("desc", "description", description)]
    ):
        element = ElementTree.Element(tag, {"id": f"{ident}-{suffix}"})
        element.text = words
        root.insert(at, element)


def png_sheet(title: str, lines: Sequence[str], figures: Sequence[Figure]) -> bytes:
    """Return a PNG file: a title, lines of text below it, and the figures one below another.

    All figures are of the wide size; the picture has ``ZOOM`` pixels for one of CSS.
    """
    import numpy as np
    from matplotlib.image import imsave

    height = HEAD + LINE * len(lines)
    header = new_figure(WIDTHS["wide"], height)
    header.text(0, 1 - 22 / height, title, size=22, weight="bold")
    for at, words in enumerate(lines):
        header.text(0, 1 - (52 + LINE * at) / height, words, color=palette()["soft"])
    sheet = np.vstack([_pixels(figure) for figure in (header, *figures)])
    margin = (ZOOM * MARGIN, ZOOM * MARGIN)
    buffer = io.BytesIO()
    imsave(buffer, np.pad(sheet, (margin, margin, (0, 0)), constant_values=255), format="png")
    return buffer.getvalue()


def _pixels(figure: Figure) -> np.ndarray:
    """Return the figure drawn, as (height, width, 4) uint8."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(ZOOM * PIXELS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def _localise(element: ElementTree.Element) -> None:
    """Drop XML namespaces, which HTML does not have, clipping, of no use here, and indentation."""
    element.tag = element.tag.rpartition("}")[2]
    given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    given.pop("clip-path", None)
    element.attrib = given
    element.text = (element.text or "").strip() or None
    element.tail = None


def _remove(root: ElementTree.Element, tags: Sequence[str]) -> None:
    """Remove the elements with these tags: the style in defs would rule the whole page."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in tags:
                parent.remove(child)


def _add_tooltips(group: ElementTree.Element, tooltips: Sequence[str]) -> None:
    """Give each marker of the group, or the group that is one mark, its title."""
    if not tooltips:
        return
    marks = list(group.iter("use")) or [group]
    for mark, words in zip(marks, tooltips, strict=True):
        title = ElementTree.Element("title")
        title.text = words
        mark.insert(0, title)


def _prefix_ids(root: ElementTree.Element, ident: str) -> None:
    """Make ids and references to them unique on the page."""
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", f"{ident}-{element.attrib['id']}")
        if "href" in element.attrib:
            element.set("href", f"#{ident}-{element.attrib['href'][1:]}")


def _themed(svg: str) -> str:
    """Replace palette colours by their variables, and leave the choice of font to the page."""
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    for name, colour in palette().items():
        svg = svg.replace(colour, f"var(--{name})")
    return re.sub(r"\s*\n\s*", " ", svg)
