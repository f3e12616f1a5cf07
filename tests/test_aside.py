"""Weights beside a graph: taken, carried through passes, put back."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from linexport import aside, passes

WIDTH = 160


def model() -> tuple[onnx.ModelProto, np.ndarray]:
    """x W^T + 1, as torch writes a linear layer."""
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"]),
        helper.make_node("Add", ["y", "one"], ["out"]),
    ]
    shape = ["n", WIDTH]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32([1]), "one")],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10), weight


def test_weights_go_on_in_the_memory_of_their_owner() -> None:
    whole, weight = model()
    small, weights = aside.take(whole, {"w": weight})
    assert weights["w"] is weight and small.ByteSize() < 1000
    _, others = aside.take(model()[0], {"w": weight + 1})
    np.testing.assert_array_equal(others["w"], weight)


def test_passes_carry_them_without_a_copy() -> None:
    whole, weight = model()
    expected = passes.run(whole)
    small, weights = aside.take(whole, {"w": weight})
    rewritten = passes.rewrite(small, weights=weights)
    (name,) = rewritten.weights
    assert rewritten.model.ByteSize() < 1000
    assert np.shares_memory(rewritten.weights[name], weight)
    assert [n.op_type for n in rewritten.model.graph.node] == ["MatMul", "Add"]
    aside.put_back(rewritten.model, rewritten.weights)
    assert rewritten.model == expected
    session = onnxruntime.InferenceSession(rewritten.model.SerializeToString())
    x = np.ones((2, WIDTH), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight.T + 1, atol=1e-4)


def test_a_model_without_weights_aside_is_whole() -> None:
    whole, _ = model()
    assert passes.rewrite(whole).weights == {}
