"""MixtureOfExperts of the CPU library against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from linexport.plugins.ops.mixture_of_experts import (
    ACTIVATIONS,
    ExpertFunction,
    mixture_of_experts,
)
from linexport.targets.base import OrtSession
from tests.support.native import on_library, one_node, session
from tests.support.runtimes import Arrays

DTYPES = {
    "float32": (np.float32, TensorProto.FLOAT),
    "float16": (np.float16, TensorProto.FLOAT16),
    "bfloat16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}


@dataclass(frozen=True)
class Layer:
    """A node up to its tokens and values."""

    experts: int
    chosen: int
    width: int
    inner: int
    outputs: int
    activation: str = "silu"
    gated: bool = True
    dtype: str = "float32"
    caps: tuple[float, float] = (0.0, 0.0)

    def model(self) -> onnx.ModelProto:
        shapes: dict[str, tuple[int | str, ...]] = {
            "x": ("N", self.width),
            "index": ("N", self.chosen),
            "weight": ("N", self.chosen),
            "up": (self.experts, self.inner * (1 + self.gated), self.width),
            "down": (self.experts, self.outputs, self.inner),
        }
        own = dict(zip(("gate_cap", "value_cap"), self.caps, strict=True))
        own |= {"activation": self.activation, "gated": int(self.gated)}
        return one_node("MixtureOfExperts", shapes, ("y",), DTYPES[self.dtype][1], **own)

    def inputs(self, seed: int, tokens: int, spread: float = 1.0) -> Arrays:
        """Random values that 16 bits can hold; the lower ``spread``, the fewer experts are hit."""
        rng = np.random.default_rng(seed)
        hit = max(self.chosen, round(self.experts * spread))
        x = {
            "x": rng.normal(size=(tokens, self.width)),
            "weight": rng.normal(size=(tokens, self.chosen)),
            "up": rng.normal(size=(self.experts, self.inner * (1 + self.gated), self.width)),
            "down": rng.normal(size=(self.experts, self.outputs, self.inner)),
        }
        x = {n: v.astype(DTYPES[self.dtype][0]).astype(np.float32) for n, v in x.items()}
        return x | {"index": rng.random((tokens, hit)).argsort(1)[:, : self.chosen]}

    def oracle(self, x: Arrays) -> np.ndarray:
        wide = {n: v if n == "index" else v.astype(np.float64) for n, v in x.items()}
        return mixture_of_experts(ExpertFunction(self.activation, self.gated, *self.caps), **wide)

    def bound(self, x: Arrays) -> np.ndarray:
        """Return the sum of what is added up for y, all of it positive: rounding is of its size."""
        sizes = {n: np.abs(v).astype(np.float64) for n, v in x.items() if n != "index"}
        h = (sizes["up"][x["index"]] @ sizes["x"][:, None, :, None])[..., 0]
        first, *factor = np.split(h, 2, -1) if self.gated else [h]
        hidden = np.prod([first ** (2 if self.activation == "relu2" else 1), *factor], axis=0)
        y = (sizes["down"][x["index"]] @ hidden[..., None])[..., 0]
        found: np.ndarray = (sizes["weight"][..., None] * y).sum(1)
        return found


def check(layer: Layer, x: Arrays, threads: int = 1) -> None:
    [got], want = on_library(layer.model(), threads)(x), layer.oracle(x)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 1e-6 * layer.bound(x)).all()


@st.composite
def layers(draw: st.DrawFn, widths: st.SearchStrategy[int]) -> Layer:
    experts = draw(st.integers(1, 9))
    caps = st.sampled_from([0.0, 0.5, 10.0])
    gated = draw(st.booleans())
    return Layer(
        experts,
        draw(st.integers(1, experts)),
        *(draw(widths) for _ in range(3)),
        draw(st.sampled_from(sorted(ACTIVATIONS))),
        gated,
        caps=(draw(caps), draw(caps) if gated else 0.0),
    )


@pytest.mark.smoke
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_equals_oracle(data: st.DataObject) -> None:
    """Any widths, experts, tokens and thread count; routers that spread tokens and that do not."""
    layer = data.draw(layers(st.integers(1, 40)))
    tokens, spread = data.draw(st.integers(0, 30)), data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    x = layer.inputs(data.draw(st.integers(0, 99)), tokens, spread)
    check(layer, x, data.draw(st.integers(1, 5)))


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_oracle_of_wide_experts(activation: str, tokens: int) -> None:
    layer = Layer(4, 2, 257, 130, 129, activation)
    check(layer, layer.inputs(0, tokens), threads=2)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_soft_caps_of_small_and_large_values(activation: str, size: float) -> None:
    """As exact where a cap changes nothing as where it is reached."""
    layer = Layer(4, 2, 19, 21, 5, activation, caps=(10.0, 7.0))
    x = layer.inputs(0, 30)
    check(layer, {**x, "x": np.float32(size) * x["x"]})


@pytest.mark.slow
def test_equals_function_where_tokens_take_turns() -> None:
    """More hidden values than are kept at once."""
    layer = Layer(2, 2, 8, 1024, 8)
    x = layer.inputs(0, 9000)
    [got] = on_library(layer.model(), threads=2)(x)
    want = OrtSession(layer.model().SerializeToString(), threads=2).run(x)["y"]
    assert (np.abs(got - want) <= 1e-6 * layer.bound(x)).all()


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits(dtype: str, tokens: int) -> None:
    """The very bits of float32, rounded once."""
    layer = Layer(5, 2, 33, 18, 21, dtype=dtype)
    x = layer.inputs(0, tokens)
    [want] = on_library(replace(layer, dtype="float32").model(), threads=2)(x)
    [got] = on_library(layer.model(), threads=2)(x)
    np.testing.assert_array_equal(got, want.astype(DTYPES[dtype][0]).astype(np.float32))


@pytest.mark.parametrize("tokens", [1, 64])
def test_same_bits_whatever_the_threads(tokens: int) -> None:
    layer = Layer(6, 3, 130, 140, 150)
    x = layer.inputs(0, tokens)
    alone, *others = (on_library(layer.model(), threads)(x)[0] for threads in (1, 2, 3, 5))
    for other in others:
        np.testing.assert_array_equal(other, alone)


@pytest.mark.parametrize("index", [-1, 3])
def test_experts_that_are_not_there_are_refused(index: int) -> None:
    layer = Layer(3, 2, 4, 4, 4)
    x = layer.inputs(0, 2)
    x["index"][1, 0] = index
    with pytest.raises(Exception, match="expert that is not there"):
        on_library(layer.model())(x)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("x", (3, 4)),
        ("index", (2, 3)),
        ("weight", (2, 1)),
        ("up", (3, 5, 4)),
        ("down", (2, 4, 4)),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    layer = Layer(3, 2, 4, 4, 4)
    model = layer.model()
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    x, opened = layer.inputs(0, 2), session(model)
    opened.run(None, x)
    with pytest.raises(Exception, match="MixtureOfExperts"):
        opened.run(None, {**x, name: np.zeros(shape, x[name].dtype)})


@pytest.mark.parametrize(
    ("gated", "name", "cap", "message"),
    [
        (True, "gate_cap", -1.0, "a cap is no positive number"),
        (True, "value_cap", float("nan"), "a cap is no positive number"),
        (False, "value_cap", 1.0, "value_cap needs a gate"),
    ],
)
def test_wrong_caps_are_refused(gated: bool, name: str, cap: float, message: str) -> None:
    model = Layer(3, 2, 4, 4, 4, gated=gated).model()
    node = next(n for n in model.graph.node if n.op_type == "MixtureOfExperts")
    next(a for a in node.attribute if a.name == name).f = cap
    with pytest.raises(Exception, match=message):
        on_library(model)(Layer(3, 2, 4, 4, 4).inputs(0, 2))


def test_unknown_activation_is_refused() -> None:
    model = Layer(3, 2, 4, 4, 4).model()
    node = next(n for n in model.graph.node if n.op_type == "MixtureOfExperts")
    next(a for a in node.attribute if a.name == "activation").s = b"tanh"
    with pytest.raises(Exception, match="unknown activation tanh"):
        session(model)
