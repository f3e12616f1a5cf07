"""Nodes written by the names of their operators compute what they say, in the shapes they state."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from linexport.graph.builder import NodeBuilder

FLOAT = np.dtype(np.float32)


def variable(*shape: int | str, dtype: np.dtype = FLOAT) -> gs.Variable:
    return gs.Variable("x", dtype, list(shape))


def computed(builder: NodeBuilder, x: gs.Variable, y: gs.Variable, value: np.ndarray) -> np.ndarray:
    graph = gs.Graph(builder.nodes, [x], [y], opset=21, ir_version=10)
    model = gs.export_onnx(graph, do_type_check=False)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": value})[0]


def test_an_expression_computes_what_it_says() -> None:
    builder, x = NodeBuilder("stem"), variable("batch", 6)
    op = builder.op
    y = op.ReduceSum(op.Mul(op.Reshape(x, [0, 2, -1]), 0.5), [1], keepdims=0)
    value = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert y.shape == ["batch", 3]
    assert np.array_equal(computed(builder, x, y, value), value.reshape(2, 2, 3).sum(1) / 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_a_number_has_the_type_of_the_tensor_beside_it(dtype: type) -> None:
    builder = NodeBuilder("stem")
    y = builder.op.Add(variable(3, dtype=np.dtype(dtype)), 1)
    assert builder.nodes[0].inputs[1].dtype == dtype
    assert y.dtype == dtype


def test_comparisons_and_casts_have_their_own_types() -> None:
    builder, x = NodeBuilder("stem"), variable("n")
    assert builder.op.Less(x, 0.0).dtype == bool
    assert builder.op.Cast(x, to=onnx.TensorProto.INT64).dtype == np.int64
    assert builder.op.Shape(x).dtype == np.int64


def test_names_of_sizes_go_through_operators() -> None:
    builder, x = NodeBuilder("stem"), variable("batch", "time", 4)
    op = builder.op
    assert op.Transpose(x, perm=[1, 0, 2]).shape == ["time", "batch", 4]
    assert op.Concat(op.Unsqueeze(x, [3]), op.Unsqueeze(x, [3]), axis=3).shape == [
        "batch",
        "time",
        4,
        2,
    ]
    assert op.Add(x, np.zeros((1, 1, 4), np.float32)).shape == ["batch", "time", 4]


def test_a_shape_that_does_not_follow_is_left_out() -> None:
    builder, x = NodeBuilder("stem"), variable("batch", "time", 4)
    assert builder.op.Slice(x, [1], [9], [1]).shape is None
    other = gs.Variable("other", FLOAT, ["more"])
    assert builder.op.Add(variable("time"), other).shape is None
    assert builder.op.Neg(gs.Variable("untyped")).dtype is None


def test_what_is_given_is_not_inferred() -> None:
    builder, x = NodeBuilder("stem"), variable("batch", "time", 4)
    y = builder.op.Slice(x, [0], [-1], [1], shape=["batch", "time-1", 4])
    assert (y.shape, y.dtype) == (["batch", "time-1", 4], FLOAT)


def test_operators_of_linexport_are_of_its_domain() -> None:
    builder, x = NodeBuilder("stem"), variable("batch", 4, "time")
    taps = np.ones((4, 1, 2), np.float32)
    builder.op.CausalConvWithState(x, taps, dtype=FLOAT, shape=x.shape, activation="none")
    (node,) = builder.nodes
    assert (node.domain, node.attrs) == ("linexport", {"activation": "none"})


def test_an_operator_that_there_is_not_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Multiply"):
        NodeBuilder("stem").op.Multiply(variable(1), 2)


def test_no_two_values_have_one_name() -> None:
    builder, x = NodeBuilder("stem"), variable(2)
    for _ in range(3):
        builder.op.Add(x, 1.0)
    names = [t.name for n in builder.nodes for t in (*n.inputs[1:], *n.outputs)]
    assert len(set(names)) == len(names) == 6
