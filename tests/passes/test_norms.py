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


@pytest.mark.parametrize("sizes", [(16, 20), (150, 153), (4001,)], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1e-2])
def test_the_norm_of_an_image_that_is_nearly_constant_is_right(
    sizes: tuple[int, ...], spread: float
) -> None:
    rng = np.random.default_rng(0)
    own = {"scale": rng.normal(size=4), "shift": rng.normal(size=4)}
    shape = ["batch", 4, *(f"axis_{i}" for i in range(len(sizes)))]
    graph = helper.make_graph(
        [node("InstanceNormalization", "x,scale,shift", "y", epsilon=1e-5)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in own.items()],
    )
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    written = passes.run(given)
    x = (3.3 + spread * rng.normal(size=(3, 4, *sizes))).astype(np.float32)
    values = x.astype(np.float64).reshape(3, 4, -1)
    values -= values.mean(2, keepdims=True)
    values /= np.sqrt((values**2).mean(2, keepdims=True) + 1e-5)
    scale, shift = (own[k].astype(np.float32)[:, None].astype(np.float64) for k in own)
    expected = (values * scale + shift).reshape(x.shape)
    np.testing.assert_allclose(run(written, x)[0], expected, atol=1e-5)
    assert spread or np.abs(run(given, x)[0] - expected).max() > 1e-5, "the test can fail"
    assert passes.run(written) == written, "centred once"


def test_the_norm_of_groups_of_a_constant_image_is_zero() -> None:
    shape = ["batch", 4, "height", "width"]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            node("Reshape", "x,groups", "g"),
            node("InstanceNormalization", "g,scale,shift", "n"),
            node("Shape", "x", "sizes"),
            node("Reshape", "n,sizes", "y"),
        ],
        "g",
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(np.array([0, 2, -1]), "groups"),
            numpy_helper.from_array(np.ones(2, np.float32), "scale"),
            numpy_helper.from_array(np.zeros(2, np.float32), "shift"),
        ],
    )
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = np.full((2, 4, 150, 153), 3.3, np.float32)
    assert np.abs(run(given, x)[0]).max() > 1e-3
    assert not run(passes.run(given), x)[0].any()
