"""Nodes, values and sessions that the library does not expect: an error, or the function."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from linexport.plugins.cpu import library
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.targets.base import OrtSession
from tests.support.layouts import Layout
from tests.support.native import on_library, session

LAYOUT = Layout(LinearAttentionSpec(2, 1), 1)


@pytest.mark.parametrize(
    "attribute, value, message",
    [
        ("update_rule", "quadratic", "unknown update_rule"),
        ("q_num_heads", 0, "head counts"),
        ("q_num_heads", 3, "multiple of the other"),
        ("kv_num_heads", -1, "head counts"),
        ("feature_map", "x" * 200, "is not computed"),
        ("absent_inputs", [3], "TensorRT"),
    ],
)
def test_unknown_attributes_are_refused(attribute: str, value: object, message: str) -> None:
    layout = Layout(LinearAttentionSpec(2, 2), 2)
    model = layout.model()
    node = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    with pytest.raises(Exception, match=message):
        session(model)


@pytest.mark.parametrize(
    "attribute, value",
    [("state_window", 2), ("q_num_heads", "two"), ("scale", 1), ("update_rule", 7), ("", 2)],
)
def test_nodes_of_another_form_run_by_the_function(
    attribute: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Which ONNX Runtime does not tell a library: it would compute something."""
    model, x = LAYOUT.model(), LAYOUT.inputs(np.random.default_rng(0), 1, 5)
    want = OrtSession(model.SerializeToString(), threads=1).run(x)["output"]
    node = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    if attribute:
        kept = [a for a in node.attribute if a.name != attribute]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    else:
        next(o for o in model.opset_import if o.domain == "linexport").version = value
    with caplog.at_level(logging.INFO, "linexport"):
        opened = OrtSession(model.SerializeToString(), threads=1, native=True)
    assert not opened.native and (attribute or "version 2 of the domain") in caplog.text
    np.testing.assert_array_equal(opened.run(x)["output"], want)


def retyped(name: str, kind: int) -> onnx.ModelProto:
    model = Layout(LinearAttentionSpec(2, 2), 2, past=True).model()
    next(v for v in model.graph.input if v.name == name).type.tensor_type.elem_type = kind
    return model


@pytest.mark.parametrize(
    "name, kind",
    [
        ("query", TensorProto.DOUBLE),
        ("query", TensorProto.INT64),
        ("query", TensorProto.FLOAT16),
        ("past_state", TensorProto.FLOAT16),
    ],
)
def test_wrong_types_are_refused(name: str, kind: int) -> None:
    with pytest.raises(Exception, match="LinearAttention"):
        session(retyped(name, kind))


@pytest.mark.parametrize("pool", [0, 1, 2, 64])
@pytest.mark.parametrize("entry", ["", "-3", "abc", "0", "1", "1000000", "9" * 14, "9" * 20])
def test_any_number_of_threads(pool: int, entry: str) -> None:
    """What the session's pool has, and what the library is told that it has."""
    layout = Layout(LinearAttentionSpec(1, 1), 1, 16, 300, past=True)
    x = layout.inputs(np.random.default_rng(0), 1, 200)
    options = ort.SessionOptions()
    options.intra_op_num_threads = pool
    options.add_session_config_entry(library.THREADS, entry)
    options.register_custom_ops_library(str(library.path()))
    opened = ort.InferenceSession(layout.model().SerializeToString(), options)
    for got, want in zip(opened.run(None, x), on_library(layout.model())(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_two_sessions_and_two_callers_of_each() -> None:
    layout = Layout(LinearAttentionSpec(2, 2), 2, 16, 160, past=True)
    x = layout.inputs(np.random.default_rng(0), 1, 100)
    want = on_library(layout.model())(x)
    opened = [session(layout.model(), 2) for _ in range(2)]
    with ThreadPoolExecutor(4) as callers:
        for got in callers.map(lambda i: opened[i % 2].run(None, x), range(100)):
            for one, two in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("query", (1, 5, 7)),
        ("query", (1, 4, 6)),
        ("key", (1, 5, 2)),
        ("key", (2, 5, 3)),
        ("value", (1, 5, 0)),
        ("past_state", (1, 1, 3, 4)),
        ("decay", (1, 5, 2)),
        ("key_mask", (1, 4)),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """ONNX Runtime checks ranks and fixed sizes of a graph's inputs; here none are known."""
    layout = Layout(LinearAttentionSpec(2, 1, "gated"), 1, past=True, masked=True)
    model = layout.model()
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"{value.name}_{id(dim)}"
    x = layout.inputs(np.random.default_rng(0), 1, 5)
    opened = session(model)
    opened.run(None, x)
    with pytest.raises(Exception, match="LinearAttention"):
        opened.run(None, {**x, name: np.ones(shape, x[name].dtype)})


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8, 12, 20])
@pytest.mark.parametrize("length", [1, 9])
def test_memory_that_is_not_aligned(length: int, offset: int) -> None:
    """Inputs and outputs that begin at any byte."""
    layout = Layout(LinearAttentionSpec(2, 2), 2, d_k=16, d_v=16, past=True)
    x = layout.inputs(np.random.default_rng(0), 1, length)
    opened = session(layout.model())
    binding, want = opened.io_binding(), opened.run(None, x)
    held = []

    def place(value: np.ndarray) -> int:
        held.append(np.zeros(value.nbytes + 64, np.uint8)[offset : offset + value.nbytes])
        held[-1][:] = np.frombuffer(value.tobytes(), np.uint8)
        return int(held[-1].ctypes.data)

    for name, value in x.items():
        binding.bind_input(name, "cpu", 0, np.float32, value.shape, place(value))
    for output, value in zip(opened.get_outputs(), want, strict=True):
        empty = np.zeros_like(value)
        binding.bind_output(output.name, "cpu", 0, np.float32, value.shape, place(empty))
    opened.run_with_iobinding(binding)
    for got, expected in zip(held[len(x) :], want, strict=True):
        assert got.tobytes() == expected.tobytes()
