"""The passes that write norms and softplus as runtimes have kernels for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from linexport import passes

WIDTH = 64


def model(*nodes: onnx.NodeProto, width: int = WIDTH, **constants: object) -> onnx.ModelProto:
    """x (batch, seq, width) in float32 to y."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(","), [output], **attributes)


def run(model: onnx.ModelProto, x: np.ndarray, save: str = "") -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = save
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})


def norm(root: str = "r") -> list[onnx.NodeProto]:
    """x over the root of its mean square, as q."""
    return [
        node("Pow", "x,two", "square"),
        node("ReduceMean", "square,last", "mean", keepdims=1),
        node("Add", "mean,eps", "more"),
        node("Sqrt", "more", root),
        node("Div", "x,r", "q"),
    ]


NUMBERS: dict[str, object] = {
    "two": np.float32(2),
    "last": np.array([-1]),
    "eps": np.float32(1e-5),
    "weight": np.linspace(1, 2, WIDTH, dtype=np.float32),
    "shape": np.array([0, -1]),
}


def test_a_norm_without_a_weight_becomes_one_operator(tmp_path: Path) -> None:
    given = model(*norm(), node("Reshape", "q,shape", "y"), **NUMBERS)
    written = passes.run(given)
    x = np.random.default_rng(0).normal(size=(2, 3, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(run(written, x)[0], run(given, x)[0], rtol=1e-6)
    run(written, x, str(tmp_path / "optimised.onnx"))
    kinds = {n.op_type for n in onnx.load(str(tmp_path / "optimised.onnx")).graph.node}
    assert kinds == {"SimplifiedLayerNormalization", "Reshape"}


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([*norm(), node("Mul", "q,weight", "y")], "it has a weight"),
        ([*norm()[:-1], node("Div", "weight,r", "y")], "something else is divided"),
        (
            [*norm("s")[:-1], node("Mul", "mean,s", "r"), node("Div", "x,r", "y")],
            "it is divided by something else",
        ),
    ],
)
def test_other_quotients_are_left_alone(nodes: list[onnx.NodeProto], why: str) -> None:
    written = passes.run(model(*nodes, **NUMBERS))
    assert not [i.name for i in written.graph.initializer if i.name.endswith("/ones")], why


def test_a_narrow_norm_is_left_alone() -> None:
    """ONNX Runtime's operator goes row by row."""
    written = passes.run(model(*norm(), node("Neg", "q", "y"), width=16, **NUMBERS))
    assert "Mul" not in [n.op_type for n in written.graph.node]


def softplus(threshold: float) -> onnx.ModelProto:
    return model(
        node("Greater", "x,threshold", "large"),
        node("Softplus", "x", "smooth"),
        node("Where", "large,x,smooth", "z"),
        node("Neg", "z", "y"),
        threshold=np.float32(threshold),
    )


def test_softplus_needs_no_branch() -> None:
    written = passes.run(softplus(20))
    assert [n.op_type for n in written.graph.node] == ["Softplus", "Neg"]
    x = np.linspace(-30, 120, 60 * WIDTH, dtype=np.float32).reshape(2, 30, WIDTH)
    np.testing.assert_array_equal(run(written, x)[0], run(softplus(20), x)[0])


def test_a_branch_that_changes_values_stays() -> None:
    assert "Where" in [n.op_type for n in passes.run(softplus(10)).graph.node]
