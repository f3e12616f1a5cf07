"""Sizes of images that the original is run on where it is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod

import pytest
import torch

from linexport.graph.dims import DimRange
from linexport.parity.cases import Case, plan_cases
from linexport.parity.image_cost import LEAST, PATIENCE, ImageCost, Largest

IMAGE = {
    "batch": DimRange(batch=True),
    "height": DimRange(),
    "width": DimRange(),
}
SHAPES = (("batch", 3, "height", "width"),)


def planned(dims: dict[str, DimRange], shapes: tuple[tuple[int | str, ...], ...]) -> list[Case]:
    return plan_cases(dims, dict.fromkeys(dims, 2), False, 0, shapes)


def tried(
    seconds: Callable[[int], float],
    dims: dict[str, DimRange] = IMAGE,
    shapes: tuple[tuple[int | str, ...], ...] = SHAPES,
) -> tuple[list[dict[str, int]], list[str]]:
    """Sizes at which a model is compared that takes so long for a number of values, and notes."""
    cost, notes, found = ImageCost(dims, shapes), list[str](), []
    for each in planned(dims, shapes):
        case = cost.affordable(each, notes)
        found.append(dict(case.sizes))
        batch = case.sizes["batch"]
        pixels = prod(case.sizes.values()) // batch
        cost.seconds.add(pixels, seconds(pixels))
    return found, notes


def largest(found: list[dict[str, int]]) -> dict[str, int]:
    return max(found, key=lambda sizes: sizes["height"] * sizes["width"])


def test_a_fast_model_is_compared_at_the_sizes_that_are_planned() -> None:
    expected = [dict(case.sizes) for case in planned(IMAGE, SHAPES)]
    assert tried(lambda n: 1e-6 * n) == (expected, [])


@pytest.mark.parametrize(
    "seconds", [lambda n: 1e-4 * n, lambda n: 1e-7 * n**2, lambda n: 0.01 + 2e-4 * n]
)
def test_the_largest_image_of_a_slow_model_is_smaller(seconds: Callable[[int], float]) -> None:
    whole = largest([dict(case.sizes) for case in planned(IMAGE, SHAPES)])
    found, notes = tried(seconds)
    smaller = largest(found)
    assert seconds(prod(smaller.values())) == pytest.approx(PATIENCE, rel=0.1)
    assert f"height {whole['height']}" in notes[-1] and f"height {smaller['height']}" in notes[-1]


def test_an_image_that_was_not_traced_is_compared_however_long_it_takes() -> None:
    found, _ = tried(lambda n: float(n))
    assert largest(found)["height"] * largest(found)["width"] >= LEAST * 0.95


def test_multiples_and_limits_hold() -> None:
    dims = {
        **IMAGE,
        "height": DimRange(32, multiple=32),
        "width": DimRange(32, max=480, multiple=32),
    }
    found, notes = tried(lambda n: 1e-4 * n, dims)
    assert notes
    assert all(s["height"] % 32 == s["width"] % 32 == 0 and s["width"] <= 480 for s in found)


def test_a_sequence_is_as_long_as_it_is_planned() -> None:
    dims = {"batch": IMAGE["batch"], "seq": DimRange()}
    shapes = (("batch", "seq", 8),)
    expected = [dict(c.sizes) for c in planned(dims, shapes)]
    assert tried(lambda n: 1.0 * n, dims, shapes) == (expected, [])


def test_a_module_of_scores_between_all_pixels_keeps_to_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four gigabytes are available: a matrix of scores may have half of one."""
    monkeypatch.setattr("linexport.parity.image_cost.available_memory", lambda: 4 * 10**9)
    cost, notes, sizes = ImageCost(IMAGE, SHAPES), list[str](), []
    for each in planned(IMAGE, SHAPES):
        case = cost.affordable(each, notes)
        sizes.append(dict(case.sizes))
        pixels = case.sizes["height"] * case.sizes["width"]
        cost.gigabytes.add(pixels, 4 * pixels**2 / 1e9)
    widest = largest(sizes)
    assert 4 * (widest["height"] * widest["width"]) ** 2 <= 0.55e9
    assert "GB in one tensor" in notes[-1]


def test_the_largest_tensor_of_a_model_is_measured() -> None:
    cost, case = ImageCost(IMAGE, SHAPES), Case("random", {"batch": 1, "height": 8, "width": 8}, 0)
    with cost.measuring() as taken:
        x = torch.randn(1, 3, 64)
        (x.mT @ x).softmax(-1).expand(9, 1, 64, 64).sum()
    cost.add(case, taken)
    assert cost.gigabytes.expected(64) == (4 * 64 * 64 / 1e9, 1.0)
    assert cost.seconds.expected(64)[0] > 0


def test_a_pause_is_not_time_that_the_original_takes() -> None:
    with Largest() as taken:
        time.sleep(0.5)
        seconds = taken.seconds
    assert seconds < 0.25


def test_the_shortest_time_of_one_size_counts() -> None:
    cost, notes = ImageCost(IMAGE, SHAPES), list[str]()
    for seconds in (0.001, PATIENCE, 0.001):
        cost.seconds.add(64 * 64, seconds)
    cost.affordable(Case("large", {"batch": 1, "height": 511, "width": 514}, 0), notes)
    assert notes == []
