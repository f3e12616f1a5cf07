"""Parity: what is compared, how, and that a wrong conversion does not pass."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import linexport
from linexport.errors import ParityError
from linexport.graph.dims import DimRange
from linexport.parity.cases import (
    DEFAULT_SIZES,
    LONG_SEQUENCE,
    Case,
    draw_inputs,
    longer_cases,
    plan_cases,
)
from linexport.parity.check import _cases
from linexport.parity.compare import EDGES, compare_arrays
from linexport.parity.streams.splits import LONG_STREAM, long, usual
from linexport.parity.tolerances import TOLERANCES
from linexport.sources import LoadedModel, Source

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32 = TOLERANCES["float32"]
DIMS = {"batch": DimRange(batch=True), "seq": DimRange()}
TRACED = {"batch": 2, "seq": 16}


# Comparing two arrays


def test_equal_arrays_pass_with_no_error() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))
    found = compare_arrays(x, x.copy(), FLOAT32)
    assert found.passed and found.max_absolute_error == found.max_relative_error == 0
    assert sum(found.counts) == 12


@given(st.floats(1e-3, 1e3), st.integers(0, 23))
def test_the_largest_error_is_found_and_measured_against_the_largest_value(
    size: float, place: int
) -> None:
    expected = np.linspace(-size, size / 2, 24).reshape(2, 3, 4)
    got = expected.copy()
    got.flat[place] += 0.25 * size
    found = compare_arrays(expected, got, FLOAT32)
    assert not found.passed
    assert found.worst is not None
    assert found.worst.index == tuple(np.unravel_index(place, (2, 3, 4)))
    assert found.worst.expected == expected.flat[place]
    assert found.worst.got == got.flat[place]
    assert found.max_absolute_error == pytest.approx(0.25 * size)
    assert found.max_relative_error == pytest.approx(0.25)


@pytest.mark.parametrize(("factor", "passes"), [(0.9, True), (1.1, False)])
def test_the_limit_is_absolute_plus_relative(factor: float, passes: bool) -> None:
    expected = np.array([2.0, -4.0])
    got = expected.copy()
    got[0] += factor * (FLOAT32.absolute + 4 * FLOAT32.relative)
    assert compare_arrays(expected, got, FLOAT32).passed is passes


def test_shapes_that_differ_do_not_pass() -> None:
    found = compare_arrays(np.zeros((2, 3)), np.zeros((2, 1)), FLOAT32)
    assert not found.passed
    assert found.reason == "shape (2, 1); expected (2, 3)"
    assert found.max_relative_error == float("inf") and found.worst is None


def test_empty_arrays_pass() -> None:
    assert compare_arrays(np.zeros((2, 0)), np.zeros((2, 0)), FLOAT32).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_passes_only_in_the_same_place(value: float) -> None:
    expected, got = np.ones(4), np.ones(4)
    got[2] = value
    for pair in ((expected, got), (got, expected)):
        found = compare_arrays(*pair, FLOAT32)
        assert not found.passed
        assert found.max_absolute_error == float("inf")
        assert found.worst is not None and found.worst.index == (2,)
    expected[2] = value
    assert compare_arrays(expected, got, FLOAT32).passed
    expected[2] = -value if np.isinf(value) else np.inf
    assert not compare_arrays(expected, got, FLOAT32).passed


def test_values_that_are_not_finite_are_counted_on_both_sides() -> None:
    expected = np.array([np.nan, np.inf, -np.inf, 1.0])
    got = np.array([np.nan, np.nan, 1.0, np.inf])
    found = compare_arrays(expected, got, FLOAT32)
    assert (found.nan.expected, found.nan.got) == (1, 2)
    assert (found.inf.expected, found.inf.got) == (2, 1)


def test_a_reference_of_zeros_allows_the_absolute_limit_alone() -> None:
    zeros = np.zeros(3)
    assert compare_arrays(zeros, zeros, FLOAT32).max_relative_error == 0
    near = compare_arrays(zeros, zeros + 0.5 * FLOAT32.absolute, FLOAT32)
    assert near.passed and near.max_relative_error == float("inf")
    assert not compare_arrays(zeros, zeros + 2 * FLOAT32.absolute, FLOAT32).passed


def test_integers_and_truth_values_are_compared_exactly() -> None:
    assert compare_arrays(np.arange(4), np.arange(4), FLOAT32).passed
    assert not compare_arrays(np.arange(4), np.array([0, 1, 2, 4]), FLOAT32).passed
    assert not compare_arrays(np.array([True, False]), np.array([True, True]), FLOAT32).passed


def test_the_histogram_counts_every_value() -> None:
    expected = np.ones(5)
    got = expected + np.array([0, 1e-30, 1e-7, 1e-3, 10])
    counts = np.asarray(compare_arrays(expected, got, FLOAT32).counts)
    assert counts.sum() == 5
    assert counts[0] == 2 and counts[-1] == 1
    assert counts[np.searchsorted(EDGES, -7) - 1 : np.searchsorted(EDGES, -7) + 1].sum() == 1


# What is compared


def lengths(cases: list[Case], name: str = "seq") -> set[int]:
    return {c.sizes[name] for c in cases}


def test_lengths_batches_and_seeds_are_many() -> None:
    cases = plan_cases(DIMS, TRACED, floating=True, seed=7)
    found = lengths(cases)
    assert {1, 16} <= found
    assert max(found) >= 4096
    untraced = found - {1, 16, max(found)}
    assert len(untraced) == 2 and any(n % 64 for n in untraced)
    for length in found - {max(found)}:
        assert {c.sizes["batch"] for c in cases if c.sizes["seq"] == length} == {1, 3}
    assert sorted(c.seed for c in cases) == list(range(7, 7 + len(cases)))
    assert {c.name: c.magnitude for c in cases} == {
        "random": 1.0,
        "large": 1e2,
        "tiny": 1e-3,
        "zeros": 0.0,
    }


def test_magnitudes_are_for_floating_inputs() -> None:
    assert {c.name for c in plan_cases(DIMS, TRACED, floating=False, seed=0)} == {"random"}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (DimRange(1, 64, 512), {1, 16, 37, 150, 512}),
        (DimRange(1, 8, 30), {1, 16, 8, 15, 30}),
        (DimRange(600, 700, 800), {600, 700, 800}),
        (DimRange(1, 1, 1), {1}),
        (DimRange(1, None, 100_000), {1, 16, 37, 150, LONG_SEQUENCE}),
    ],
)
def test_a_range_is_kept_and_tried_to_its_end(limits: DimRange, expected: set[int]) -> None:
    cases = plan_cases({**DIMS, "seq": limits}, TRACED, floating=True, seed=0)
    assert lengths(cases) == expected


def test_a_traced_length_among_the_usual_ones_is_replaced() -> None:
    assert lengths(plan_cases(DIMS, {"batch": 2, "seq": 37}, False, 0)) == {
        1,
        37,
        150,
        101,
        LONG_SEQUENCE,
    }


def test_longer_cases_keep_to_the_range() -> None:
    assert lengths(longer_cases(DIMS, TRACED, 0)) == {32, 48}
    assert lengths(longer_cases({**DIMS, "seq": DimRange(1, None, 40)}, TRACED, 0)) == {32}
    assert not longer_cases({"batch": DimRange(batch=True)}, {"batch": 2}, 0)


@pytest.mark.parametrize("ran", [{16}, {16, 37}, set[int]()])
def test_a_model_that_runs_at_the_traced_length_alone_is_tried_at_longer_ones(
    ran: set[int],
) -> None:
    """So is one of whole chunks, of whose chunks nothing in the trace speaks."""
    tested: Any = SimpleNamespace(
        loaded=SimpleNamespace(args=(torch.zeros(2, 16),), kwargs={}, graph=None),
        dims=DIMS,
        traced=TRACED,
        chosen=DEFAULT_SIZES,
        input_shapes=(),
        behind_at_once=0,
    )
    compared: list[Case] = []
    found = []
    for case in _cases(tested, False, 0, compared):
        found.append(case)
        compared += [case] if case.sizes["seq"] in ran else []
    assert {32, 48}.issubset(lengths(found)) == (ran <= {16})


def test_batches_keep_to_their_range() -> None:
    dims = {**DIMS, "batch": DimRange(4, None, 8, batch=True)}
    assert lengths(plan_cases(dims, TRACED, True, 0), "batch") == {4}


def test_what_is_a_batch_is_not_a_matter_of_its_name() -> None:
    dims = {"N": DimRange(batch=True), "T": DimRange()}
    cases = plan_cases(dims, {"N": 2, "T": 16}, False, 0)
    assert lengths(cases, "N") == {1, 3}
    assert max(lengths(cases, "T")) == LONG_SEQUENCE


def test_a_second_sequence_has_another_length() -> None:
    dims = {**DIMS, "seq_2": DimRange()}
    cases = plan_cases(dims, {**TRACED, "seq_2": 9}, True, 0)
    assert all(c.sizes["seq"] != c.sizes["seq_2"] for c in cases)


def test_a_model_without_dynamic_length_has_its_batches() -> None:
    dims = {"batch": DimRange(batch=True)}
    assert lengths(plan_cases(dims, {"batch": 2}, False, 0), "batch") == {1, 3}
    assert [dict(c.sizes) for c in plan_cases({}, {}, False, 0)] == [{}]


def test_inputs_are_drawn_within_their_ranges_and_the_same_again() -> None:
    loaded = LoadedModel(
        torch.nn.Identity(),
        (torch.tensor([[3, 9]]), {"mask": torch.ones(1, 2, dtype=torch.bool), "n": 5}),
        {"x": torch.zeros(1, 2)},
        None,
        Source("factory", "here", None, "a module"),
        integer_ranges={0: (10, 12)},
    )
    shapes = [["batch", "seq"]] * 3
    case = Case("random", {"batch": 3, "seq": 200}, 5, 2.0)
    args, kwargs = draw_inputs(loaded, shapes, case)
    tokens, nest = args
    assert tokens.shape == (3, 200) and set(tokens.unique().tolist()) == {10, 11}
    assert nest["n"] == 5 and nest["mask"].dtype == torch.bool and nest["mask"].any()
    assert 1.8 < kwargs["x"].std() < 2.2
    again, _ = draw_inputs(loaded, shapes, case)
    assert torch.equal(again[0], tokens)
    other, _ = draw_inputs(loaded, shapes, replace(case, seed=6))
    assert not torch.equal(other[0], tokens)
    seen, _ = draw_inputs(replace(loaded, integer_ranges={}), shapes, case)
    assert set(seen[0].unique().tolist()) == set(range(3, 10))


@given(st.integers(1, 40), st.integers(2, 900), st.integers(0, 50), st.integers(2, 300))
def test_splits_are_of_one_sequence(unit: int, units: int, seed: int, reach: int) -> None:
    limits = DimRange(unit, None, unit * units, multiple=unit)
    short = usual(limits, None, seed)
    far = long(limits, 2 * reach + 16, [reach], 500, seed)
    assert short[0].pieces == (unit,) * len(short[0].pieces)
    for split in (*short, far):
        assert sum(split.calls) == sum(split.pieces) == split.length
        assert all(limits.allows(size) for size in (*split.calls, *split.pieces))
    assert max(far.calls) <= max(500, unit) and far.length >= 2 * reach + 16


def test_a_model_of_many_words_has_few_single_tokens() -> None:
    first, *_ = usual(DimRange(), None, 0, 40)
    assert first.pieces == (1,) * 40 + (110,)
    assert usual(DimRange(), None, 0, 40)[1:] == usual(DimRange(), None, 0)[1:]


# A conversion's record


def test_the_record_covers_both_references(
    converted: Callable[..., Path], manifest_of: Callable[[Path], Any]
) -> None:
    parity = manifest_of(converted("small")).parity
    assert parity.passed is True
    assert parity.lengths == (1, 16, 37, 150, 4097)
    assert {c.reference for c in parity.cases} == {"float32", "float64"}
    assert {c.batch for c in parity.cases} == {1, 3}
    assert len({c.seed for c in parity.cases}) == len(parity.cases) / 2
    assert 0 < parity.max_relative_error < FLOAT32.relative
    assert parity.first_divergence is None
    values = sum(c.batch * c.length * 8 for c in parity.cases if c.name != "zeros")
    assert sum(parity.histogram.counts) == values


def test_values_that_are_not_finite_are_counted_and_compared(
    converted: Callable[..., Path], manifest_of: Callable[[Path], Any]
) -> None:
    parity = manifest_of(converted("not_a_number")).parity
    assert parity.passed is True
    worst = max(parity.cases, key=lambda c: c.nan.expected)
    assert worst.nan.expected == worst.nan.got > 0
    assert worst.inf.expected == worst.inf.got > 0


def test_streaming_is_tried_token_by_token_and_in_pieces(
    converted: Callable[..., Path], manifest_of: Callable[[Path], Any]
) -> None:
    streaming = manifest_of(converted("small")).streaming
    assert streaming.passed is True and streaming.reason is None
    assert streaming.splits[0] == (1,) * 150
    assert [sum(s) for s in streaming.splits] == [150, 150, 150, 150, LONG_STREAM]
    assert streaming.skipped is None


# Conversions that are wrong


def without(node: Any, name: str) -> Any:
    """The node as if it did not have that input."""
    inputs = tuple("" if n == name else n for n in node.inputs)
    return replace(node, inputs=inputs, shapes={k: v for k, v in node.shapes.items() if k != name})


def attribute(**values: Any) -> Callable[[Any], Any]:
    return lambda node: replace(node, attributes={**node.attributes, **values})


WRONG = {
    "no normaliser": (
        "small",
        lambda n: attribute(normalize=0)(without(n, "past_normalizer")),
    ),
    "scale": ("masked", attribute(scale=1.001)),
    "epsilon": ("small", attribute(eps=1e-3)),
    "mask": ("masked", lambda n: without(n, "key_mask")),
}


@pytest.mark.smoke
@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_lowering_fails_and_is_kept_and_marked(
    factories: SimpleNamespace,
    miscompile: Callable[..., None],
    tmp_path: Path,
    manifest_of: Callable[[Path], Any],
    fault: str,
    target: str,
) -> None:
    name, change = WRONG[fault]
    miscompile(target, change)
    out = tmp_path / "out"
    manifest = linexport.convert(factories.source(name), out, target=target, bench=False, threads=1)
    assert manifest.status == manifest_of(out).status == "parity_failed"
    assert manifest.parity.passed is False
    assert manifest.parity.max_relative_error > 10 * FLOAT32.relative
    assert manifest.parity.first_divergence.op == "LinearAttention"
    assert {p.name for p in out.iterdir()} == {"model.onnx", "manifest.json", "report.html"}
    with pytest.raises(ParityError, match="failed its parity check"):
        linexport.load(out)
    linexport.load(out, allow_failed=True, threads=1)


def test_a_failed_conversion_exits_3_and_leaves_the_earlier_artifact(
    factories: SimpleNamespace,
    miscompile: Callable[..., None],
    cli: Callable[..., Any],
    artifact: Path,
) -> None:
    before = {p.name: p.read_bytes() for p in artifact.iterdir()}
    miscompile("ort", attribute(scale=1.01))
    options = ("--no-bench", "--overwrite", "--json", "--threads", 1)
    failed = artifact.with_name("artifact.failed")
    for _ in range(2):  # the second time there is an earlier failed one
        result = cli("convert", factories.source("small"), "-o", artifact, *options)
        assert result.code == 3
        assert result.json()["status"] == "parity_failed"
        assert result.json()["artifact"] == str(failed)
        assert {p.name: p.read_bytes() for p in artifact.iterdir()} == before
        assert sorted(p.name for p in artifact.parent.iterdir()) == [artifact.name, failed.name]
    linexport.load(artifact, threads=1)
    with pytest.raises(ParityError):
        linexport.load(failed)
    text = cli("convert", factories.source("small"), "-o", artifact.parent / "o", "--no-bench")
    assert text.code == 3
    assert "First value that differs" in text.out


def test_an_artifact_that_cannot_run_at_a_size_fails(
    converted: Callable[..., Path],
    factories: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from linexport import targets

    place = tmp_path / "copy"
    shutil.copytree(converted("small"), place)
    right = targets.find_target("ort")

    def open_fragile(*args: Any, **options: Any) -> Any:
        session = copy.copy(right.open(*args, **options))
        run = session.run

        def fragile(inputs: Any) -> Any:
            if inputs["x"].shape[1] == 37:
                raise RuntimeError("no such size")
            return run(inputs)

        session.run = fragile
        return session

    monkeypatch.setitem(targets.loaded, "ort", replace(right, open=open_fragile))
    manifest = linexport.validate(place, source=factories.source("small"), threads=1)
    assert manifest.status == "parity_failed"
    failures = [c for c in manifest.parity.cases if not c.passed]
    assert {c.length for c in failures} == {37}
    assert all("fails at this size: no such size" in c.reason for c in failures)
