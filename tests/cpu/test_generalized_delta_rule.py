"""GeneralizedDeltaRule of the CPU library against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.plugins.ops.generalized_delta_rule import generalized_delta_rule
from tests.support.comparison import assert_close
from tests.support.native import check_in_place, on_library, one_node, session
from tests.support.runtimes import Arrays

OUTPUTS = ("output", "present_state")
SCALE = 0.5
THREADS = st.integers(1, 5)


@dataclass(frozen=True)
class Layer:
    """A node up to its lengths and values."""

    heads: int
    d_k: int
    d_v: int
    past: bool = False
    masked: bool = False

    def shapes(self) -> dict[str, tuple[int | str, ...]]:
        keys = ("query", "key", "decay", "a", "b")
        shapes: dict[str, tuple[int | str, ...]]
        shapes = dict.fromkeys(keys, ("B", "T", self.heads * self.d_k))
        shapes["value"] = ("B", "T", self.heads * self.d_v)
        if self.past:
            shapes["past_state"] = ("B", self.heads, self.d_k, self.d_v)
        if self.masked:
            shapes["key_mask"] = ("B", "T")
        return shapes

    def model(self) -> onnx.ModelProto:
        return one_node(
            "GeneralizedDeltaRule", self.shapes(), OUTPUTS, num_heads=self.heads, scale=SCALE
        )

    def inputs(self, seed: int, batch: int, length: int) -> Arrays:
        """Random values as RWKV-7 has them: a of norm 1, b its opposite times a rate in 0 ... 1."""
        rng = np.random.default_rng(seed)
        sizes = {"B": batch, "T": length}
        x = {
            n: rng.normal(size=[sizes.get(d, d) for d in shape])  # type: ignore[call-overload]
            for n, shape in self.shapes().items()
        }
        a = x["a"].reshape(batch, length, self.heads, self.d_k)
        x["a"] = (a / np.linalg.norm(a, axis=-1, keepdims=True)).reshape(x["a"].shape)
        x["b"] = -x["a"] * rng.uniform(0, 1, x["b"].shape)
        x["decay"] = -np.abs(x["decay"])
        return {n: v > -0.5 if n == "key_mask" else v.astype(np.float32) for n, v in x.items()}

    def oracle(self, x: Arrays) -> tuple[np.ndarray, ...]:
        wide = {n: v if v.dtype == bool else v.astype(np.float64) for n, v in x.items()}
        return generalized_delta_rule(self.heads, SCALE, **wide)


def check(layer: Layer, x: Arrays, threads: int = 1) -> None:
    got, want = on_library(layer.model(), threads)(x), layer.oracle(x)
    # Rounding is relative to the largest value a state has held; an output sums d_k of them.
    held = [np.abs(v).max(initial=0) for v in (want[1], x.get("past_state", want[1]))]
    added = np.abs(x["key"]).max(initial=0) * np.abs(x["value"]).max(initial=0)
    query = np.abs(x["query"]).max(initial=0) * layer.d_k**0.5
    scales = [np.full_like(w, max(*held, added) * f) for w, f in zip(want, (query, 1), strict=True)]
    assert_close(got, want, scales, 5e-7)


@st.composite
def layers(draw: st.DrawFn, widths: st.SearchStrategy[int]) -> Layer:
    return Layer(
        draw(st.integers(1, 5)),
        draw(widths),
        draw(widths),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@pytest.mark.smoke
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_equals_oracle(data: st.DataObject) -> None:
    """Any narrow heads, length, batch and thread count."""
    layer = data.draw(layers(st.integers(1, 40)))
    seed, batch = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 3))
    check(layer, layer.inputs(seed, batch, data.draw(st.integers(0, 45))), data.draw(THREADS))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_equals_oracle_at_any_size(data: st.DataObject) -> None:
    widths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 128, 255, 256]))
    layer = data.draw(layers(widths))
    x = layer.inputs(data.draw(st.integers(0, 99)), 1, data.draw(st.integers(0, 5000)))
    check(layer, x, data.draw(THREADS))


@pytest.mark.parametrize("d_k, d_v", [(64, 64), (33, 129), (256, 17), (1, 256)])
def test_equals_oracle_of_wide_heads(d_k: int, d_v: int) -> None:
    layer = Layer(2, d_k, d_v, past=True)
    check(layer, layer.inputs(0, 1, 70))


@pytest.mark.parametrize("d_v", [16, 160])
def test_pieces_and_single_steps(d_v: int) -> None:
    """A sequence in pieces, single tokens and none among them, and states in place."""
    layer = Layer(3, 20, d_v, past=True, masked=True)
    run, x = on_library(layer.model()), layer.inputs(1, 2, 41)
    whole, state = run(x)
    past, outputs, start = x["past_state"], [], 0
    for size in (1, 1, 3, 4, 0, 1, 17, 1, 13):
        piece = {n: v[:, start : start + size] for n, v in x.items() if n != "past_state"}
        output, past = run({**piece, "past_state": past})
        outputs.append(output)
        start += size
    assert start == 41
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(past, state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 40])
def test_states_in_place(length: int, threads: int) -> None:
    """Past and present bound to the same memory."""
    layer = Layer(1, 16, 160, past=True)
    check_in_place(layer.model(), layer.inputs(0, 1, length), threads)


def test_decays_that_forget_all() -> None:
    """exp(-inf) = 0, also where two such tokens follow each other."""
    layer = Layer(1, 5, 9, past=True)
    x = layer.inputs(0, 1, 11)
    x["decay"][0, [0, 3, 4, 9]] = -np.inf
    check(layer, x)


@pytest.mark.parametrize("length", [1, 200])
def test_same_bits_whatever_the_threads(length: int) -> None:
    layer = Layer(1, 33, 200, past=True)
    x = layer.inputs(0, 1, length)
    alone, *others = (on_library(layer.model(), threads)(x) for threads in (1, 2, 3, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("query", (1, 5, 7)),
        ("key", (1, 5, 4)),
        ("value", (1, 5, 0)),
        ("decay", (1, 4, 6)),
        ("a", (2, 5, 6)),
        ("b", (1, 5, 2)),
        ("past_state", (1, 2, 4, 3)),
        ("key_mask", (1, 4)),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """ONNX Runtime checks ranks and fixed sizes of a graph's inputs; here none are known."""
    layer = Layer(2, 3, 4, past=True, masked=True)
    model = layer.model()
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    x, opened = layer.inputs(0, 1, 5), session(model)
    opened.run(None, x)
    with pytest.raises(Exception, match="GeneralizedDeltaRule"):
        opened.run(None, {**x, name: np.ones(shape, x[name].dtype)})
