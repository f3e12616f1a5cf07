"""The charts: complete, described, themed by the page, right where there is little to show."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from linexport.report.axis_ticks import decade_axis, octave_axis, power_of_ten, short
from linexport.report.error_histogram import error_histogram
from linexport.report.figures import Chart, chart_style, inline_svg, new_figure, palette
from linexport.report.length_chart import LATENCY, MEMORY, Point, Series, length_chart

WIDTHS = [960, 340]


def series(name: str, *points: tuple[float, float]) -> Series:
    """A line whose p90 is a fifth above its p50."""
    return Series(name, tuple(Point(x, p50, p50 * 1.2) for x, p50 in points))


def words(svg: str) -> list[str]:
    """The texts drawn, in order."""
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("text")]


def tooltips(svg: str) -> list[str]:
    """The titles of single marks."""
    root = ElementTree.fromstring(svg)
    return [title.text or "" for title in root.iter("title") if not title.get("id")]


def assert_inside(svg: str) -> None:
    """Every word and marker lies within the drawing."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for node in [*root.iter("text"), *root.iter("use")]:
        assert -0.5 <= float(node.attrib["x"]) <= width
        assert -0.5 <= float(node.attrib["y"]) <= height


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "drawn",
    [
        [series("a", (1024, 2.4))],
        [series("a", (1, 2.4)), series("b", (1, 2.4)), series("c", (1, 2.4))],
        [series("a", *((2.0**n, 0.01 * 2**n) for n in range(17))), series("b", (65536, 1e6))],
        [series("a", (16, 1), (64, 2)), series("b"), series("c", (16, 1.01), (64, 2.01))],
        [series("a", (37, 1e-4), (100, 3e-4)), series("b", (37, 9e5))],
    ],
)
def test_any_latencies_draw_inside_the_frame(drawn: list[Series], width: int) -> None:
    svg = length_chart(drawn, LATENCY, "x", width)
    assert_inside(svg)
    measured = [one for one in drawn if one.points]
    assert {one.name for one in drawn} & set(words(svg)) == {one.name for one in measured}
    assert len(tooltips(svg)) == sum(len(one.points) for one in measured)
    assert {"ms a call", "sequence length in tokens"} <= set(words(svg))


def test_the_legend_names_lines_from_the_top_down() -> None:
    drawn = [series("low", (1, 1), (8, 2)), series("high", (1, 1), (8, 9)), series("x", (1, 5))]
    names = [word for word in words(length_chart(drawn, LATENCY, "x")) if word.isalpha()]
    assert names == ["high", "x", "low"]


@pytest.mark.parametrize("width", WIDTHS)
def test_axis_numbers_do_not_touch(width: int) -> None:
    svg = length_chart([series("a", *((2.0**n, 2.0**n) for n in range(17)))], LATENCY, "x", width)
    root = ElementTree.fromstring(svg)
    axis = next(node for node in root.iter("g") if node.get("id") == "x-matplotlib.axis_1")
    texts = [(float(text.attrib["x"]), text.text or "") for text in axis.iter("text")]
    across = sorted((x, word) for x, word in texts if word[0].isdecimal())
    # Seven pixels is about the width of one digit.
    for (left, word), (right, other) in pairwise(across):
        assert right - left > 7 * (len(word) + len(other)) / 2
    assert across[-1][1] == "65,536"


def test_a_chart_tells_its_numbers_to_those_who_cannot_see_it() -> None:
    svg = length_chart([series("artifact", (64, 1.5))], LATENCY, "id", 960)
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"] == "id-title id-description"
    assert [child.attrib["id"] for child in list(root)[:2]] == ["id-title", "id-description"]
    assert "Latency by sequence length for artifact: ms a call." in (root[1].text or "")
    assert tooltips(svg) == ["artifact, 64 tokens: p50 1.50 ms, p90 1.80 ms"]
    plain = length_chart([Series("artifact", (Point(64, 1.5),))], MEMORY, "id")
    assert tooltips(plain) == ["artifact, 64 tokens: 1.50 MB"]


def test_no_series_depends_on_colour() -> None:
    drawn = [series(name, (1, n), (2, n + 1)) for n, name in enumerate("abc", 1)]
    root = ElementTree.fromstring(length_chart(drawn, LATENCY, "x"))
    shapes = {node.get("id"): node.attrib["d"] for node in root.iter("path") if node.get("id")}
    used = {
        group.get("id"): {shapes[use.attrib["href"][1:]] for use in group.iter("use")}
        for group in root.iter("g")
        if (group.get("id") or "").startswith("x-series-")
    }
    assert len(used) == 3 and all(len(own) == 1 for own in used.values())
    assert len(set.union(*used.values())) == 3


def test_a_line_breaks_where_a_length_could_not_run() -> None:
    whole = series("a", (1, 1), (2, 2), (4, 4), (8, 8))
    gap = series("b", (1, 2), (2, 4), (8, 16))

    def pieces(drawn: list[Series], index: int) -> int:
        style = f"stroke: var(--s{index}); stroke-width: {2 if index else 3}; "
        paths = ElementTree.fromstring(length_chart(drawn, LATENCY, "x")).iter("path")
        return sum(p.attrib["d"].count("M") for p in paths if style in p.get("style", "") + " ")

    assert pieces([whole, gap], 0) == 1
    assert pieces([whole, gap], 1) == 2
    assert pieces([gap], 0) == 1


def test_nothing_to_draw_draws_nothing() -> None:
    assert length_chart([series("a")], LATENCY, "x") == ""
    assert length_chart([], LATENCY, "x") == ""
    assert error_histogram([-2, -1], [0], 1e-5, "x") == ""
    assert error_histogram([], [], 1e-5, "x") == ""
    assert error_histogram([-2, -1], [1, 2], 1e-5, "x") == ""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("limit", [None, 1e-12, 5e-5, 10.0])
def test_any_histogram_draws_inside_the_frame(limit: float | None, width: int) -> None:
    for counts in ([5, 0, 0], [1, 3_000_000_000, 2], [0, 0, 1]):
        svg = error_histogram([-7, -6.5, -6, -5.5], counts, limit, "x", width)
        assert_inside(svg)
        assert [tip.split(": ")[1] for tip in tooltips(svg)] == [
            f"{count:,}" for count in counts if count
        ]
        assert ("relative tolerance" in svg) == (limit is not None)


def bars(svg: str) -> list[tuple[float, str]]:
    """Height and colour of each bar."""
    found = []
    for group in ElementTree.fromstring(svg).iter("g"):
        if (group.get("id") or "").startswith("x-bin-"):
            (path,) = group.iter("path")
            heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.attrib["d"])]
            colour = re.search(r"fill: var\(--(\w+)\)", path.attrib["style"])
            found.append((max(heights) - min(heights), colour[1] if colour else ""))
    return found


def test_bars_beyond_the_tolerance_are_marked() -> None:
    found = bars(error_histogram([-7, -6, -5, -4], [9, 9, 1], 1e-5, "x"))
    assert [colour for _, colour in found] == ["s0", "s0", "bad"]


def test_one_element_among_millions_is_seen() -> None:
    found = bars(error_histogram([-7, -6, -5, -4], [1, 3_000_000_000, 2], None, "x"))
    assert all(height > 2 for height, _ in found)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_gives_colours_and_font(width: int) -> None:
    for svg in (
        length_chart([series("a", (1, 2), (2, 3)), series("b", (1, 3))], LATENCY, "x", width),
        error_histogram([-7, -6, -5, -4], [9, 9, 1], 1e-5, "x", width),
    ):
        assert not re.search(r"#[0-9a-f]{6}|font-family|http|url\(|<style", svg)
        assert set(re.findall(r"var\(--([\w-]+)\)", svg)) <= set(palette())


def test_words_of_a_model_are_text() -> None:
    """No markup, and no formula between dollars."""
    svg = length_chart([series("<b>$\\frac$", (1, 2))], LATENCY, "x")
    assert "<b>" not in svg and "<b>$\\frac$" in words(svg)


def test_settings_of_the_user_neither_show_nor_change() -> None:
    one = series("a", (1, 2), (2, 3))
    before = length_chart([one], LATENCY, "x")
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "font.size": 30}):
        assert length_chart([one], LATENCY, "x") == before
        assert matplotlib.rcParams["font.size"] == 30


def test_two_charts_of_a_page_share_no_ids() -> None:
    one = [series("a", (1, 2), (2, 3))]
    idents = [
        set(re.findall(r' id="([^"]+)"', length_chart(one, LATENCY, name))) for name in ("x", "y")
    ]
    assert idents[0] and not idents[0] & idents[1]


def test_a_tooltip_that_fits_no_mark_is_an_error() -> None:
    with chart_style():
        figure = new_figure(200, 100)
        figure.add_subplot().plot([1, 2], [1, 2], "o", gid="line")
        with pytest.raises(ValueError, match="shorter"):
            inline_svg(Chart(figure, "t", "d", {"line": ["one alone"]}), "x")


def test_ticks_are_round() -> None:
    octaves = [
        ([16, 1024], 9, [16, 32, 64, 128, 256, 512, 1024]),
        ([1, 65536], 4, [2, 64, 2048, 65536]),
        ([1000], 9, [512, 1024]),
    ]
    for lengths, most, expected in octaves:
        axes = Figure().add_subplot()
        octave_axis(axes, lengths, most)
        assert sorted(axes.get_xticks()) == expected
    for values, expected in ([0.3, 700], [1, 10, 100, 1000]), ([2, 9], [1, 2, 5, 10]):
        axes = Figure().add_subplot()
        decade_axis(axes, "y", values, 8)
        assert axes.get_yticks() == pytest.approx(expected)
        low, high = axes.get_ylim()
        assert low <= min(values) and max(values) <= high and math.isfinite(high)
    assert [short(value) for value in (0.05, 10, 2_500_000)] == ["0.05", "10", "2.5M"]
    assert power_of_ten(-12) == "10⁻¹²"


def test_the_report_draws_without_a_display_or_a_writable_home() -> None:
    code = (
        "import sys; from linexport.report.length_chart import *; "
        "assert 'matplotlib' not in sys.modules; "
        "print(length_chart([Series('a', (Point(1, 2),))], LATENCY, 'x')[:4]); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {"HOME": "/nonexistent", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "<svg", done.stderr
