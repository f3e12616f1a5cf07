"""Ranges of dynamic dimensions: what users may write, and how they narrow the model's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linexport.errors import UsageError
from linexport.graph.dims import DimRange, merge, parse, sequence


def test_ranges_by_name() -> None:
    assert parse(["seq=1:64:512", "batch=2:2:2"]) == {
        "seq": DimRange(1, 64, 512),
        "batch": DimRange(2, 2, 2),
    }


@pytest.mark.parametrize(
    "option",
    ["seq", "=1:2:3", *(f"seq={x}" for x in ("", "1", "1:2", "1:2:3:4", "a:b:c", "1:2:-3"))],
)
def test_other_forms_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="NAME=MIN:OPT:MAX"):
        parse([option])


@pytest.mark.parametrize(
    "option", ["", "seq=1.0:2:3", "seq=1::3", "seq=1:2:", "seq = 1:2:3", "seq=²:3:4"]
)
def test_sizes_that_are_no_whole_numbers_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="NAME=MIN:OPT:MAX"):
        parse([option])


@pytest.mark.parametrize("sizes", ["5:4:6", "1:7:6", "6:6:5", "0:1:2"])
def test_sizes_out_of_order_are_refused(sizes: str) -> None:
    low, opt, high = sizes.split(":")
    with pytest.raises(UsageError, match=f"MIN {low}, OPT {opt}, MAX {high}"):
        parse([f"seq={sizes}"])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse(["seq=1:2:3", "seq=1:2:4"])


def test_the_users_range_takes_the_place_of_the_models_and_keeps_its_part() -> None:
    found = {"items": DimRange(batch=True), "steps": DimRange(1, None, 512)}
    merged = merge(found, {"items": DimRange(1, 1, 4), "steps": DimRange(2, 3, 512)})
    assert merged == {"items": DimRange(1, 1, 4, batch=True), "steps": DimRange(2, 3, 512)}
    assert merge(found, {}) == found


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"length.*batch, seq"):
        merge({"seq": DimRange(), "batch": DimRange()}, {"length": DimRange(1, 2, 3)})
    with pytest.raises(UsageError, match="every dimension is fixed"):
        merge({}, {"length": DimRange(1, 2, 3)})


@pytest.mark.parametrize("wanted", [DimRange(1, 8, 513), DimRange(1, 8, 16)])
def test_a_range_beyond_the_models_is_refused(wanted: DimRange) -> None:
    with pytest.raises(UsageError, match="takes 2 to 512"):
        merge({"seq": DimRange(2, None, 512)}, {"seq": wanted})


@given(st.integers(1, 9), st.none() | st.integers(9, 20), st.integers(-5, 30))
def test_nearest_is_allowed_and_no_further_than_it_must_be(
    low: int, high: int | None, size: int
) -> None:
    limits = DimRange(low, None, high)
    assert limits.allows(limits.nearest(size))
    if limits.allows(size):
        assert limits.nearest(size) == size


def test_the_sequence_is_the_first_dimension_that_is_no_batch() -> None:
    dims = {"items": DimRange(batch=True), "steps": DimRange(), "more": DimRange()}
    assert sequence(dims) == "steps"
    assert sequence({"items": DimRange(batch=True)}) is None
