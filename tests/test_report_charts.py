"""The charts: well-formed, labelled without overlap, and right where there is little to show."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from linexport.report.charts import Point, Series, error_histogram, latency_chart
from linexport.report.scales import decades, octaves, round_steps, short, spread

WIDTHS = [960, 340]


def series(name: str, *points: tuple[float, float]) -> Series:
    """A line whose p90 is a fifth above its p50."""
    return Series(name, tuple(Point(x, p50, p50 * 1.2) for x, p50 in points))


def texts(svg: str, style: str) -> list[tuple[str, float, float]]:
    """Words and places of the text elements of one class."""
    root = ElementTree.fromstring(svg)
    return [
        (node.text or "", float(node.attrib["x"]), float(node.attrib["y"]))
        for node in root.iter("text")
        if style in node.attrib["class"].split()
    ]


def assert_inside(svg: str) -> None:
    """Every coordinate lies within the drawing."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for node in root.iter():
        for key, value in node.attrib.items():
            if key in {"x", "x1", "x2"}:
                assert -0.5 <= float(value) <= width
            if key in {"y", "y1", "y2"}:
                assert -0.5 <= float(value) <= height
        for x, y in re.findall(r"([-.\d]+),([-.\d]+)", node.attrib.get("points", "")):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height


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
    svg = latency_chart(drawn, "x", width)
    assert_inside(svg)
    labels = texts(svg, "label")
    assert [name for name, _, _ in labels] == [one.name for one in drawn if one.points]
    heights = sorted(y for _, _, y in labels)
    assert all(high - low >= 16 for low, high in pairwise(heights))
    assert len(texts(svg, "middle")) >= 2  # the title of the axis and a tick


@pytest.mark.parametrize("width", WIDTHS)
def test_axis_numbers_do_not_touch(width: int) -> None:
    svg = latency_chart([series("a", *((2.0**n, 2.0**n) for n in range(17)))], "x", width)
    ticks = [(word, x) for word, x, _ in texts(svg, "tick") if x > 44 or word == "1"]
    across = sorted((x, word) for word, x in ticks if x > 44)
    # Seven pixels is about the width of one digit.
    for (left, word), (right, other) in pairwise(across):
        assert right - left > 7 * (len(word) + len(other)) / 2
    assert across[-1][1] == "65,536"


def test_a_chart_tells_its_numbers_to_those_who_cannot_see_it() -> None:
    svg = latency_chart([series("artifact", (64, 1.5))], "id", 960)
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-labelledby"] == "id-t id-d"
    assert [child.attrib["id"] for child in list(root)[:2]] == ["id-t", "id-d"]
    assert "artifact, 64 tokens: p50 1.50 ms, p90 1.80 ms" in svg


def test_a_line_breaks_where_a_length_could_not_run() -> None:
    whole = series("a", (1, 1), (2, 2), (4, 4), (8, 8))
    gap = series("b", (1, 2), (2, 4), (8, 16))
    assert latency_chart([whole], "x").count("<polyline") == 1
    assert latency_chart([whole, gap], "x").count("<polyline") == 3


@pytest.mark.parametrize("width", WIDTHS)
def test_a_label_away_from_its_line_is_led_to_it(width: int) -> None:
    apart = [series("a", (1, 1), (64, 2)), series("b", (1, 50), (64, 90))]
    assert latency_chart(apart, "x", width).count('class="leader"') == 0
    shorter = [apart[0], series("b", (1, 50), (32, 90))]
    assert latency_chart(shorter, "x", width).count('class="leader"') == 1
    single = [series("a", (1024, 2)), series("b", (1024, 90))]
    assert latency_chart(single, "x", width).count('class="leader"') == 2


def test_nothing_to_draw_draws_nothing() -> None:
    assert latency_chart([series("a")], "x") == ""
    assert latency_chart([], "x") == ""
    assert error_histogram([-2, -1], [0], 1e-5, "x") == ""
    assert error_histogram([], [], 1e-5, "x") == ""
    assert error_histogram([-2, -1], [1, 2], 1e-5, "x") == ""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("limit", [None, 1e-12, 5e-5, 10.0])
def test_any_histogram_draws_inside_the_frame(limit: float | None, width: int) -> None:
    for counts in ([5, 0, 0], [1, 3_000_000_000, 2], [0, 0, 1]):
        svg = error_histogram([-7, -6.5, -6, -5.5], counts, limit, "x", width)
        assert_inside(svg)
        assert svg.count("<rect") == sum(much > 0 for much in counts)
        assert ("relative tolerance" in svg) == (limit is not None)


def test_bars_beyond_the_tolerance_are_marked() -> None:
    svg = error_histogram([-7, -6, -5, -4], [9, 9, 1], 1e-5, "x")
    assert re.findall(r'class="(bar[^"]*)"', svg) == ["bar", "bar", "bar over"]


def test_ticks_are_round() -> None:
    assert octaves([16, 1024], 9)[2] == [16, 32, 64, 128, 256, 512, 1024]
    assert octaves([1, 65536], 4)[2] == [2, 64, 2048, 65536]
    assert octaves([1000], 9)[2] == [512, 1024]
    assert decades([0.3, 700], 8)[2] == [1, 10, 100, 1000]
    assert decades([2, 9], 8)[2] == [1, 2, 5, 10]
    assert round_steps(7) == [0, 2, 4, 6, 8]
    assert round_steps(1) == [0, 1]
    assert [short(value) for value in (0.05, 10, 2_500_000)] == ["0.05", "10", "2.5M"]


def test_labels_part_as_little_as_they_must() -> None:
    assert spread([10, 100], 17, 0, 200) == [10, 100]
    assert spread([50, 50], 20, 0, 200) == pytest.approx([40, 60], abs=0.1)
    crowded = spread([199, 200, 198], 17, 0, 200)
    assert crowded[2] < crowded[0] < crowded[1] <= 200.01
