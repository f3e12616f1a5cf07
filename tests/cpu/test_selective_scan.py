"""Mamba's selective scan on the CPU library against the float64 oracle."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from tests.support.comparison import assert_close
from tests.support.layouts import Layout
from tests.support.native import check_in_place, on_library, one_node

OUTPUTS = ("output", "present_state", "present_normalizer")
THREADS = st.integers(1, 5)


def scan(
    groups: int, served: int, d_k: int, past: bool = True, masked: bool = False, scale: float = 1.0
) -> Layout:
    """``groups`` queries and keys, each of ``served`` heads."""
    spec = LinearAttentionSpec(groups, groups * served, "gated", scale=scale)
    return Layout(spec, groups, d_k, 1, past=past, masked=masked, factored=True)


def model(layout: Layout, outputs: int = 2) -> onnx.ModelProto:
    """The node with its first outputs; the third one is asked for by graphs that do not read it."""
    attributes = layout.spec.attributes()
    return one_node("LinearAttention", layout.widths(), OUTPUTS[:outputs], **attributes)


def check(layout: Layout, x: dict[str, np.ndarray], threads: int = 1, outputs: int = 2) -> None:
    got = on_library(model(layout, outputs), threads)(x)
    assert_close(got, layout.reference(x)[:outputs], layout.magnitude(x)[:outputs], 3e-6)


@pytest.mark.smoke
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_equals_oracle(data: st.DataObject) -> None:
    """Any heads, width, length, batch and thread count, a few tokens among them."""
    layout = scan(
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 20)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1.0, 0.35])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    length = data.draw(st.one_of(st.integers(0, 5), st.integers(0, 140)))
    x = layout.inputs(rng, data.draw(st.integers(0, 3)), length)
    check(layout, x, data.draw(THREADS), data.draw(st.integers(2, 3)))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_equals_oracle_at_any_size(data: st.DataObject) -> None:
    layout = scan(
        data.draw(st.integers(1, 2)), data.draw(st.integers(1, 600)), data.draw(st.integers(1, 64))
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    check(layout, layout.inputs(rng, 1, data.draw(st.integers(0, 1500))), data.draw(THREADS))


@pytest.mark.parametrize("served", [1, 50])
def test_pieces_and_single_steps(served: int) -> None:
    layout = scan(2, served, 16, masked=True)
    run, x = on_library(model(layout)), layout.inputs(np.random.default_rng(1), 2, 110)
    whole, state = run(x)
    past, outputs, start = x["past_state"], [], 0
    for size in (1, 1, 3, 4, 0, 1, 70, 1, 29):
        given_ = {"past_state": past, "decay_scale": x["decay_scale"]}
        piece = {n: v[:, start : start + size] for n, v in x.items() if n not in given_}
        output, past = run({**piece, **given_})
        outputs.append(output)
        start += size
    assert start == 110
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(past, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("length", "groups"), [(1, 1), (40, 1), (40, 70)])
def test_states_in_place(length: int, groups: int, threads: int) -> None:
    """Past and present bound to the same memory."""
    layout = scan(groups, 70 // groups, 16)
    check_in_place(model(layout), layout.inputs(np.random.default_rng(0), 2, length), threads)


@pytest.mark.parametrize(("length", "groups"), [(2, 1), (9, 1), (9, 11)])
def test_decays_that_forget_all(length: int, groups: int) -> None:
    layout = scan(groups, 11 // groups, 5)
    x = layout.inputs(np.random.default_rng(0), 1, length)
    x["decay"][0, 1] = np.inf
    check(layout, x)


@pytest.mark.parametrize("factor", [-20.0, 20.0, 80.0, 1e4])
def test_exponents_near_the_largest_and_beyond(factor: float) -> None:
    """Of some tokens alone: their neighbours are computed another way."""
    layout = scan(1, 40, 5)
    x = layout.inputs(np.random.default_rng(0), 2, 70)
    x["decay"][:, 33] = factor / np.abs(x["decay_scale"]).max()
    x["decay_scale"] = -np.abs(x["decay_scale"])
    check(layout, x)


def test_decays_that_stay_the_same() -> None:
    """Heads with keys of their own, whose decays are computed where they differ from the last."""
    layout = scan(5, 1, 20)
    x = layout.inputs(np.random.default_rng(0), 2, 70)
    x["decay"][:, 10:60] = 1.0
    x["decay"][1, 30, 2:] = 0.0
    check(layout, x, threads=2)


@pytest.mark.parametrize(("length", "groups"), [(1, 1), (100, 1), (100, 300)])
def test_same_bits_whatever_the_threads(length: int, groups: int) -> None:
    layout = scan(groups, 300 // groups, 16)
    x = layout.inputs(np.random.default_rng(0), 1, length)
    alone, *others = (on_library(model(layout), threads)(x) for threads in (1, 2, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)
