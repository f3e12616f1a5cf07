"""Ranges of dynamic dimensions: what users may write, and how they narrow the model's own.

Multiples of a number, too: a module in chunks that takes 64 n tokens.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.graph.dims import (
    DimRange,
    follow,
    followers,
    merge,
    parse,
    related,
    sequence,
)
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.independent import check_independently


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


CHUNK = 4


class Chunked(nn.Module):
    """Attention in chunks of a length that must divide that of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4 n, 24) -> (B, 4 n, 8)."""
        q, k, v = x.unflatten(1, (x.shape[1] // CHUNK, CHUNK)).chunk(3, -1)
        states = torch.einsum("bncd,bnce->bnde", k, v)
        before = torch.einsum("bncd,bnde->bnce", q, states.cumsum(1) - states)
        return (before + torch.einsum("bncd,bnsd->bncs", q, k).tril() @ v).flatten(1, 2)


def chunked(spec: object) -> tuple[nn.Module, tuple[Tensor, ...], object]:
    return Chunked(), (torch.randn(2, 3 * CHUNK, 24),), spec


def test_a_multiple_of_a_dim_is_a_dimension_whose_sizes_are_multiples() -> None:
    n = Dim("blocks", min=2, max=100)
    found = trace(load_module(chunked(({0: Dim("batch"), 1: CHUNK * n},)), "a:b"))
    assert found.dims == {
        "batch": DimRange(batch=True),
        "4*blocks": DimRange(4, None, 400, multiple=4),
    }
    assert found.example_sizes == {"batch": 2, "4*blocks": 12}
    shape = found.graph.graph.input[0].type.tensor_type.shape
    assert [d.dim_param or d.dim_value for d in shape.dim] == ["batch", "4*blocks", 24]


@given(st.integers(1, 9), st.integers(1, 50), st.integers(0, 50), st.integers(-5, 600))
def test_the_nearest_size_is_allowed(multiple: int, low: int, more: int, size: int) -> None:
    limits = DimRange(multiple * low, None, multiple * (low + more), multiple=multiple)
    found = limits.nearest(size)
    assert limits.allows(found)
    assert limits.allows(size) == (found == size)
    assert found >= size or found == limits.max


class Decoder(nn.Module):
    """A stage of a U-Net: the image before is half as high and wide as the skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.qkv = nn.Conv2d(8, 12, 1)

    def forward(self, skip: Tensor, x: Tensor) -> Tensor:
        """(B, 4, 2 h, 2 w) and (B, 4, h, w) -> (B, 4, 4 h w)."""
        q, k, v = self.qkv(torch.cat([self.up(x), skip], 1)).flatten(2).chunk(3, 1)
        return (v @ k.softmax(-1).mT) @ q.softmax(1)


DECODER = torch.randn(2, 4, 10, 12), torch.randn(2, 4, 5, 6)
B, H, W, TALL, WIDE = map(Dim, ("batch", "h", "w", "tall", "wide"))


@pytest.mark.parametrize(
    "spec",
    [
        ({0: B, 2: 2 * H, 3: 2 * W}, {0: B, 2: H, 3: W}),
        ({0: B, 2: TALL, 3: WIDE}, {0: B, 2: H, 3: W}),
        ({0: B, 2: TALL, 3: 2 * W}, {0: B, 2: H, 3: W}),
    ],
    ids=["written", "found", "both"],
)
def test_a_size_that_follows_from_another_inputs_follows_it(spec: object) -> None:
    found = trace(load_module((Decoder(), DECODER, spec), "a:b"))
    assert found.example_sizes == {"batch": 2, "h": 5, "w": 6, "2*h": 10, "2*w": 12}
    assert found.dims["2*h"] == DimRange(2, multiple=2) == found.dims["h"].times(2)
    assert sequence(found.dims) == "h", "sizes are chosen of what others follow from"
    shape = found.graph.graph.input[0].type.tensor_type.shape
    assert [d.dim_param or d.dim_value for d in shape.dim] == ["batch", 4, "2*h", "2*w"]


def test_sizes_of_the_default_dims_are_found_to_be_related() -> None:
    class Rates(nn.Module):
        def forward(self, x: Tensor, frames: Tensor) -> Tensor:
            return (x.repeat_interleave(4, 1) + frames).cumsum(1)

    example = torch.randn(2, 12, 8), torch.randn(2, 48, 8)
    assert {*trace(load_module((Rates(), example), "a:b")).dims} == {"batch", "seq", "4*seq"}


def test_a_decoder_converts_and_its_calls_are_checked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = load_module(
        (Decoder(), DECODER, ({0: B, 2: 2 * H, 3: 2 * W}, {0: B, 2: H, 3: W})), "a:b"
    )
    options = {"bench": False, "threads": 1}
    manifest = linexport.convert(model, tmp_path / "a", dims=("h=1:9:40",), **options)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 1
    assert (manifest.dims["2*h"].min, manifest.dims["2*h"].max) == (2, 80)
    artifact = linexport.load(tmp_path / "a", threads=1)
    for b, h, w in ((1, 1, 1), (3, 37, 23)):
        skip, x = torch.randn(b, 4, 2 * h, 2 * w), torch.randn(b, 4, h, w)
        with torch.no_grad():
            expected = copy.deepcopy(model.module).double()(skip.double(), x.double())
        found = artifact.run(skip.numpy(), x.numpy())["output"]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    with pytest.raises(UsageError, match=r"Found 2\*w 12 and w 5; expected 10, 2 times"):
        artifact.run(*(np.zeros(s, np.float32) for s in ((1, 4, 6, 12), (1, 4, 3, 5))))
    with pytest.raises(UsageError, match=r"sizes of 2\*h are 2 times those of h. Limit h"):
        linexport.convert(model, tmp_path / "b", dims=("2*h=2:4:8",), **options)


def test_a_sum_of_another_size_is_refused() -> None:
    class Next(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x[:, 1:] + y

    n = Dim("n")
    example = torch.randn(3, 5), torch.randn(3, 4)
    with pytest.raises(UnsupportedModelError, match="which follows from the size of another"):
        trace(load_module((Next(), example, ({1: n + 1}, {1: n})), "a:b"))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_followers_are_as_many_times_as_large(times: int, low: int, more: int, opt: int) -> None:
    most = low + more * opt
    dims = {f"{times}*h": DimRange(batch=True), "h": DimRange(low, most, most), "3*n": DimRange(3)}
    found = follow(dims)
    assert found[f"{times}*h"] == DimRange(times * low, times * most, times * most, multiple=times)
    assert found["3*n"] == dims["3*n"] and followers(dims) == {f"{times}*h": (times, "h")}
    sizes = related({f"{times}*h": 1, "h": most, "3*n": 6})
    assert sizes == {f"{times}*h": times * most, "h": most, "3*n": 6}


@pytest.mark.slow
def test_a_model_in_chunks_of_fixed_length_streams_in_chunks(tmp_path: Path) -> None:
    model = load_module(chunked(({0: Dim("batch"), 1: CHUNK * Dim("blocks")},)), "a:b")
    manifest = linexport.convert(model, tmp_path / "a", target="onnx", bench=True, threads=1)
    assert manifest.fused == {"LinearAttention": 1} and manifest.streaming.passed
    assert all(sum(p) % CHUNK == 0 for p in manifest.streaming.splits)
    check_independently(tmp_path / "a", Chunked(), 24, lengths=(4, 12, 128, 516), unit=CHUNK)
    stream = linexport.load(tmp_path / "a", threads=1).stream()
    with pytest.raises(UsageError, match=r"4\*blocks 3; the model takes multiples of 4"):
        stream.step(np.zeros((1, 3, 24), np.float32))


def test_the_past_may_be_empty_and_is_left_to_the_states() -> None:
    """No input of the model has it, before states are found."""
    asked = parse(["past=0:10:40", "seq=1:2:3"])
    assert asked["past"] == DimRange(0, 10, 40)
    assert merge({"seq": DimRange()}, asked) == {"seq": DimRange(1, 2, 3)}
    assert merge({"past": DimRange(0)}, {"past": asked["past"]})["past"].max == 40
    for wrong in ("past=0:0:0", "past=5:1:9", "seq=0:1:2"):
        with pytest.raises(UsageError, match="MIN <= OPT <= MAX"):
            parse([wrong])
