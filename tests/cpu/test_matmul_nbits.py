"""Products with weights of four and eight bits, against the sums of integers they are made of."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.cpu import library
from linexport.plugins.cpu.library import FUSED_DOMAIN
from linexport.plugins.ops.body import MICROSOFT
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion.integer_products import OP, with_integer_products
from tests.support.native import on_library


def computed() -> bool:
    """Whether the library that is tested has the operator on the machine that runs it."""
    file = os.environ.get("LINEXPORT_TEST_LIBRARY") or str(library.path())
    remote = "LINEXPORT_TEST_PYTHON" in os.environ
    return not remote and bool(ctypes.CDLL(file).linexport_multiplies_integers())


pytestmark = pytest.mark.skipif(not computed(), reason="not for this machine")


@dataclass(frozen=True)
class Product:
    """A product of random weights.

    Attributes:
        width: of the activations.
        outputs: rows of weights.
        bits: of a weight.
        block: weights that share a scale.
        zeros: whether zero points are stored.
        bias: whether something is added.
    """

    width: int
    outputs: int
    bits: int = 4
    block: int = 32
    zeros: bool = False
    bias: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.width // self.block)

    def stored(self) -> dict[str, np.ndarray]:
        """Initializers, as ONNX Runtime's operator has them."""
        random = np.random.default_rng(self.width + 1000 * self.outputs)
        rows = self.outputs, self.blocks
        packed = random.integers(0, 256, (*rows, self.block * self.bits // 8), np.uint8)
        found = {"w": packed, "s": random.uniform(0.1, 1, rows).astype(np.float32)}
        if self.zeros:
            size = self.outputs, -(-self.blocks * self.bits // 8)
            found["z"] = random.integers(0, 256, size, np.uint8)
        if self.bias:
            found["c"] = random.standard_normal(self.outputs).astype(np.float32)
        return found

    def model(self, domain: str, **more: object) -> onnx.ModelProto:
        """A graph of one node."""
        names = ["z" if self.zeros else "", *([""] if domain == MICROSOFT else [])]
        given = ["x", "w", "s", *names, "c" if self.bias else ""]
        sizes = {"K": self.width, "N": self.outputs, "bits": self.bits, "block_size": self.block}
        node = helper.make_node(OP, given, ["y"], domain=domain, **sizes, **more)
        lead = ["batch", "length"]
        graph = helper.make_graph(
            [node],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*lead, self.width])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*lead, self.outputs])],
            [numpy_helper.from_array(array, name) for name, array in self.stored().items()],
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def weights(self) -> np.ndarray:
        """Meaning of the weights, (outputs, blocks, block), in float64."""
        own = self.stored()
        shape = self.outputs, self.blocks, self.block
        values = self._unpacked(own["w"]).reshape(shape).astype(np.float64)
        zeros = np.full(shape[:2], 2.0 ** (self.bits - 1))
        if self.zeros:
            zeros = self._unpacked(own["z"]).reshape(self.outputs, -1)[:, : self.blocks]
        return (values - zeros[..., None]) * own["s"][..., None].astype(np.float64)

    def _unpacked(self, packed: np.ndarray) -> np.ndarray:
        return packed if self.bits == 8 else np.stack([packed & 15, packed >> 4], -1)

    def oracle(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of what activations are rounded to, and the sizes of its terms."""
        padded = np.zeros((len(x), self.blocks * self.block), np.float32)
        padded[:, : self.width] = x
        parts = padded.reshape(len(x), self.blocks, self.block)
        size = np.abs(parts).max(-1, keepdims=True)
        rate = np.where(size > 1e-35, np.float32(127) / np.maximum(size, 1e-35), 0)
        rounded = np.rint(parts * rate.astype(np.float32)) * (size.astype(np.float64) / 127)
        weights = self.weights()
        added = self.stored().get("c", np.zeros(self.outputs))
        y = np.einsum("mbk,nbk->mn", rounded, weights) + added
        return y, np.einsum("mbk,nbk->mn", np.abs(rounded), np.abs(weights)) + np.abs(added)


@pytest.mark.smoke
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    width=st.one_of(st.integers(1, 80), st.integers(81, 1200)),
    outputs=st.integers(1, 100),
    tokens=st.one_of(st.integers(0, 20), st.sampled_from([31, 64, 130, 600])),
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([16, 32, 64, 128, 256]),
    zeros=st.booleans(),
    bias=st.booleans(),
    threads=st.integers(1, 3),
    scale=st.sampled_from([1e-30, 1.0, 1e20]),
)
@example(1024, 70, 1, 4, 32, False, False, 2, 1.0)
@example(1056, 33, 13, 8, 32, True, True, 1, 1.0)
@example(512, 513, 513, 4, 32, False, True, 2, 1.0)
def test_equals_oracle(
    width: int,
    outputs: int,
    tokens: int,
    bits: int,
    block: int,
    zeros: bool,
    bias: bool,
    threads: int,
    scale: float,
) -> None:
    product = Product(width, outputs, bits, block, zeros, bias)
    random = np.random.default_rng(tokens)
    x = (random.standard_normal((tokens, width)) * scale).astype(np.float32)
    x[: tokens // 2, : block // 2] = 0
    [y] = on_library(product.model(FUSED_DOMAIN), threads)({"x": x[None]})
    want, terms = product.oracle(x)
    assert y.shape == (1, tokens, outputs)
    # Sums of a block are exact; their conversion, two products and a sum a block are not.
    assert (np.abs(y[0] - want) <= 2**-23 * (4 + product.blocks) * terms).all()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("bits", [4, 8])
def test_largest_sums(bits: int, tokens: int) -> None:
    """Of the largest activations and weights, with the zero point that makes them largest."""
    product = Product(512, 32, bits, 256, zeros=True)
    model = product.model(FUSED_DOMAIN)
    for tensor in model.graph.initializer:
        if tensor.name in "wz":
            full = 255 if tensor.name == "w" else 0
            array = np.full(tuple(tensor.dims), full, np.uint8)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        elif tensor.name == "s":
            ones = np.ones(tuple(tensor.dims), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(ones, "s"))
    x = np.full((1, tokens, 512), -127, np.float32)
    [y] = on_library(model)({"x": x})
    np.testing.assert_array_equal(y, -127 * 512 * (2**bits - 1))


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_numbers_spread_to_their_token_alone(value: float, tokens: int) -> None:
    product = Product(96, 20)
    x = np.random.default_rng(0).standard_normal((1, tokens, 96)).astype(np.float32)
    run = on_library(product.model(FUSED_DOMAIN))
    [want] = run({"x": x})
    x[0, tokens - 1, 40] = value
    [y] = run({"x": x})
    assert np.isnan(y[0, tokens - 1]).all()
    np.testing.assert_array_equal(y[0, : tokens - 1], want[0, : tokens - 1])


def test_a_token_is_the_same_in_every_call() -> None:
    """Alone, among few and among many: sums of a block are exact."""
    product = Product(320, 50)
    x = np.random.default_rng(0).standard_normal((1, 60, 320)).astype(np.float32)
    run = on_library(product.model(FUSED_DOMAIN))
    [whole] = run({"x": x})
    for count in (1, 5, 13, 33):
        [y] = run({"x": x[:, :count]})
        np.testing.assert_allclose(y, whole[:, :count], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "setting, value, message",
    [("bits", 2, "bits"), ("block_size", 48, "block_size"), ("K", 0, "K or N")],
)
def test_unknown_settings_are_refused(setting: str, value: int, message: str) -> None:
    model = Product(64, 32).model(FUSED_DOMAIN)
    next(a for a in model.graph.node[0].attribute if a.name == setting).i = value
    with pytest.raises(Exception, match=message):
        on_library(model)


@pytest.mark.parametrize("name, message", [("w", "weights"), ("s", "scales"), ("z", "zero points")])
def test_other_sizes_are_refused(name: str, message: str) -> None:
    model = Product(64, 32, zeros=True).model(FUSED_DOMAIN)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    short = numpy_helper.to_array(tensor)[:-1]
    tensor.CopyFrom(numpy_helper.from_array(short, name))
    run = on_library(model)
    with pytest.raises(Exception, match=f"{message} have a wrong size"):
        run({"x": np.zeros((1, 1, 64), np.float32)})


def kinds(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in with_integer_products(model).graph.node]


@pytest.mark.parametrize("bits", [4, 8])
def test_sessions_run_by_it(bits: int) -> None:
    product = Product(256, 64, bits, zeros=True, bias=True)
    model = product.model(MICROSOFT, accuracy_level=4)
    assert kinds(model) == [(FUSED_DOMAIN, OP)]
    x = {"x": np.random.default_rng(0).standard_normal((2, 9, 256)).astype(np.float32)}
    content = model.SerializeToString()
    native, other = (OrtSession(content, 1, native=own).run(x)["y"] for own in (True, False))
    np.testing.assert_allclose(native, other, rtol=0, atol=1e-4 * np.abs(other).max())


def test_others_are_left() -> None:
    product = Product(64, 32)
    assert kinds(product.model(MICROSOFT, accuracy_level=1)) == [(MICROSOFT, OP)]
    assert kinds(product.model(MICROSOFT)) == [(MICROSOFT, OP)]
    half = product.model(MICROSOFT, accuracy_level=4)
    scales = next(t for t in half.graph.initializer if t.name == "s")
    scales.CopyFrom(numpy_helper.from_array(product.stored()["s"].astype(np.float16), "s"))
    assert kinds(half) == [(MICROSOFT, OP)]
    ordered = product.model(MICROSOFT, accuracy_level=4)
    ordered.graph.node[0].input[4] = "order"
    assert kinds(ordered) == [(MICROSOFT, OP)]


def test_a_table_is_read_as_it_is_stored() -> None:
    """Of a tied head: without the copy of another shape that ONNX Runtime would make."""
    product = Product(64, 32)
    model = product.model(MICROSOFT, accuracy_level=4)
    table = next(t for t in model.graph.initializer if t.name == "w")
    table.CopyFrom(numpy_helper.from_array(product.stored()["w"].reshape(32, -1), "w"))
    sizes = numpy_helper.from_array(np.array([32, 2, -1], np.int64), "sizes")
    model.graph.initializer.append(sizes)
    model.graph.node.insert(0, helper.make_node("Reshape", ["w", "sizes"], ["blocks"]))
    model.graph.node[1].input[1] = "blocks"
    changed = with_integer_products(model)
    assert [node.input[1] for node in changed.graph.node] == ["w"]
    x = np.random.default_rng(0).standard_normal((1, 3, 64)).astype(np.float32)
    y = OrtSession(model.SerializeToString(), 1, native=True).run({"x": x})["y"]
    want, terms = product.oracle(x[0])
    assert (np.abs(y[0] - want) <= 2**-20 * terms).all()
