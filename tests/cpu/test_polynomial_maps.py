"""Maps of polynomials in LinearAttention of the CPU library against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.models import feature_maps
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from tests.support.comparison import assert_close
from tests.support.layouts import HEADS, mapped_model
from tests.support.native import check_in_place, on_library, session
from tests.support.runtimes import Arrays

MAPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("taylor2", {}),
    ("quadratic", {}),
    ("quadratic", {"c": 0.7}),
    ("monomials", {"degree": 3}),
    ("polynomial", {"coefficients": [0.5, 0.0, 2.0, 0.3]}),
)
RTOL = 3e-6


@dataclass(frozen=True)
class Mapped:
    """A node that applies a map, up to its lengths and values."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int, int] = (2, 2, 2)
    d: int = 4
    d_v: int = 5
    normalize: bool = True
    past: bool = False
    masked: bool = False

    @property
    def phi(self) -> Any:
        return feature_maps.make(self.kind, self.d, self.options)

    @property
    def spec(self) -> LinearAttentionSpec:
        query_heads, heads, _ = self.heads
        return LinearAttentionSpec(
            query_heads, heads, normalize=self.normalize, scale=0.5, eps=0.25
        )

    def shapes(self) -> dict[str, tuple[Any, ...]]:
        query_heads, heads, key_heads = self.heads
        widths = {"query": query_heads * self.d, "key": key_heads * self.d}
        shapes: dict[str, tuple[Any, ...]] = {n: ("B", "T", w) for n, w in widths.items()}
        shapes["value"] = ("B", "T", heads * self.d_v)
        features = self.phi.features
        if self.past:
            shapes["past_state"] = ("B", heads, features, self.d_v)
        if self.past and self.normalize:
            shapes["past_normalizer"] = ("B", heads, features)
        if self.masked:
            shapes["key_mask"] = ("B", "T")
        return shapes

    def model(self) -> onnx.ModelProto:
        return mapped_model(self.spec, self.phi, self.shapes())

    def inputs(self, seed: int, batch: int, length: int) -> Arrays:
        """Random values; a past that keys have made, so that denominators stay above 0."""
        rng = np.random.default_rng(seed)
        sizes = {"B": batch, "T": length}
        x = {}
        for name, shape in self.shapes().items():
            drawn = rng.normal(size=[sizes.get(n, n) for n in shape])
            x[name] = drawn > -0.5 if name == "key_mask" else drawn.astype(np.float32)
        if "past_normalizer" in x:
            shape = x["past_normalizer"].shape
            keys = self._mapped(rng.normal(size=(*shape[:2], 3, self.d))).sum(2)
            x["past_normalizer"] = keys.astype(np.float32)
        if self.kind == "monomials":  # an odd power: positive where queries and keys are
            x["query"], x["key"] = np.abs(x["query"]), np.abs(x["key"])
            if "past_normalizer" in x:
                x["past_normalizer"] = np.abs(x["past_normalizer"])
        return x

    def _mapped(self, x: np.ndarray) -> np.ndarray:
        wide = torch.from_numpy(x.astype(np.float64))
        return np.asarray(self.phi.phi(wide, *self.phi.frozen()))

    def reference(self, x: Arrays, magnitude: bool = False) -> tuple[np.ndarray, ...]:
        """The oracle on the features in float64, or on their absolute values."""
        wide = {n: a if a.dtype == bool else a.astype(np.float64) for n, a in x.items()}
        for name, heads in (("query", self.heads[0]), ("key", self.heads[2])):
            batch, length, _ = wide[name].shape
            features = self._mapped(wide[name].reshape(batch, length, heads, self.d))
            wide[name] = features.reshape(batch, length, heads * self.phi.features)
        if not magnitude:
            return linear_attention(self.spec, **wide)
        terms = {n: a if n == "key_mask" else np.abs(a) for n, a in wide.items()}
        output, state, normalizer = linear_attention(self.spec, **terms)
        if not self.normalize:
            return output, state, normalizer
        # Both sums of the ratio are rounded, each in proportion to its terms.
        (top, below), (value, den) = self._sums(terms), self._sums(wide)
        return top / np.abs(den) + np.abs(value) / den**2 * below, state, normalizer

    def _sums(self, x: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Numerators and denominators."""
        query_heads, heads, _ = self.heads
        spec = LinearAttentionSpec(query_heads, heads, scale=self.spec.scale)
        given_ = {n: a for n, a in x.items() if n != "past_normalizer"}
        ones = given_ | {"value": np.ones_like(x["value"])}
        if "past_normalizer" in x:
            z = x["past_normalizer"][..., None]
            ones["past_state"] = np.broadcast_to(z, (*z.shape[:3], self.d_v))
        values, denominators = (linear_attention(spec, **one)[0] for one in (given_, ones))
        return values, denominators + self.spec.eps


def check(layer: Mapped, x: Arrays, threads: int = 1) -> None:
    got = on_library(layer.model(), threads)(x)
    assert_close(got, layer.reference(x), layer.reference(x, magnitude=True), RTOL, 1e-30)


@pytest.mark.smoke
@pytest.mark.parametrize("kind, options", MAPS, ids=lambda x: str(x))
@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_equals_oracle(kind: str, options: dict[str, Any], data: st.DataObject) -> None:
    """Any heads, narrow width, length, batch and thread count."""
    flags = {f: data.draw(st.booleans()) for f in ("normalize", "past", "masked")}
    layer = Mapped(
        kind,
        options,
        data.draw(st.sampled_from(HEADS)),
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(1, 40)),
        **flags,
    )
    length = data.draw(st.one_of(st.integers(0, 8), st.integers(40, 140)))
    check(
        layer, layer.inputs(1, data.draw(st.integers(0, 2)), length), data.draw(st.integers(1, 4))
    )


@pytest.mark.parametrize("kind, d", [("taylor2", 64), ("quadratic", 31), ("taylor2", 16)])
@pytest.mark.parametrize("length", [1, 5, 100])
def test_equals_oracle_of_wide_heads(kind: str, d: int, length: int) -> None:
    layer = Mapped(kind, heads=(1, 1, 1), d=d, d_v=24, past=True)
    check(layer, layer.inputs(0, 1, length), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["taylor2", "quadratic"])
@settings(max_examples=20, deadline=None)
@given(d=st.sampled_from([1, 7, 32, 65, 128]), d_v=st.integers(1, 256), length=st.integers(0, 5000))
def test_equals_oracle_at_any_size(kind: str, d: int, d_v: int, length: int) -> None:
    layer = Mapped(kind, heads=(1, 1, 1), d=d, d_v=min(d_v, 16) if d > 64 else d_v)
    check(layer, layer.inputs(0, 1, min(length, 20_000_000 // (d * d * layer.d_v + 1))), 2)


def test_same_bits_whatever_the_threads() -> None:
    layer = Mapped("taylor2", heads=(1, 1, 1), d=9, d_v=130, past=True)
    x = layer.inputs(0, 1, 150)
    alone, *others = (on_library(layer.model(), threads)(x) for threads in (1, 2, 3, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("length", [1, 100])
def test_states_in_place(length: int) -> None:
    """Past and present bound to the same memory."""
    layer = Mapped("taylor2", heads=(1, 1, 1), d=9, d_v=96, past=True)
    check_in_place(layer.model(), layer.inputs(0, 1, length), 3)


@pytest.mark.parametrize(
    "kind, name, value, message",
    [
        ("polynomial", "parameter_0", np.full((3, 4), 9, np.int64), "component .* out of range"),
        ("polynomial", "parameter_0", np.full((3, 4), -1, np.int64), "component .* out of range"),
        ("polynomial", "parameter_1", np.ones(2, np.float32), "parameter .* wrong shape"),
        ("polynomial", "parameter_2", np.ones(40, np.float32), "degree is above 15"),
        ("monomials", "parameter_0", np.zeros((3, 0), np.int64), "components .* wrong shape"),
        ("monomials", "parameter_1", np.ones(4, np.float32), "parameter .* wrong shape"),
        ("quadratic", "parameter_0", np.ones(2, np.float32), "parameter .* wrong shape"),
        ("quadratic", "parameter_0", -np.ones(1, np.float32), "constant is negative"),
    ],
)
def test_hostile_parameters_are_refused(
    kind: str, name: str, value: np.ndarray, message: str
) -> None:
    """Those of a file that linexport has not written."""
    options = {"quadratic": {"c": 1.0}, "polynomial": {"coefficients": [1.0, 1.0]}}.get(kind, {})
    layer = Mapped(kind, options, heads=(1, 1, 1), d=2, d_v=3)
    model, x = layer.model(), layer.inputs(0, 1, 5)
    initializer = next(t for t in model.graph.initializer if t.name == name)
    initializer.CopyFrom(onnx.numpy_helper.from_array(value, name))
    with pytest.raises(Exception, match=message):
        session(model).run(None, x)


def test_other_forms_are_left_to_the_function() -> None:
    shapes = dict.fromkeys(("query", "key", "value"), ("B", "T", 4))
    spec = LinearAttentionSpec(1, 1, causal=False)
    model = mapped_model(spec, feature_maps.make("taylor2", 4, {}), shapes)
    with pytest.raises(Exception, match="taylor2 is computed causally, by the linear rule"):
        session(model)
