"""Norms written as ONNX Runtime's operators: values beside a float64 oracle, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport.targets.lowering.cuda_norms import (
    LAYER,
    MICROSOFT,
    NORMS,
    SIMPLIFIED,
    known_to_onnx,
    with_residuals,
    with_root_mean_squares,
)
from linexport.targets.trt.precision import half

Nodes = list[tuple[str, list[str], list[str], dict[str, Any]]]
Constants = dict[str, np.ndarray]

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def graph(
    nodes: Nodes,
    constants: Constants,
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    inner: dict[str, list[int | str]],
    dtype: str = "float32",
) -> onnx.ModelProto:
    """Return a model; ``inner`` are shapes of other values."""

    def info(shapes: dict[str, list[int | str]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TYPES[dtype], s) for n, s in shapes.items()]

    made = helper.make_graph(
        [helper.make_node(op, i, o, f"node {o[0]}", **a) for op, i, o, a in nodes],
        "norm",
        info(inputs),
        info(outputs),
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
        value_info=info(inner),
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(model: onnx.ModelProto, feeds: Constants) -> list[np.ndarray]:
    return list(onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds))


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def root_mean_square(
    width: int,
    rank: int = 3,
    square: str = "Pow",
    form: str = "Div",
    weight_first: bool = False,
    epsilon: float = 1e-6,
    **changes: Any,
) -> onnx.ModelProto:
    """x / Sqrt(mean(x^2) + eps) * w as nodes; ``changes`` make it something else."""
    shape = [*["b", "t", "h"][: rank - 1], width]
    rng = np.random.default_rng(width)
    axis = changes.get("axis", -1)
    constants = {
        "two": np.array(changes.get("power", 2), np.float32),
        "axes": np.array([axis], np.int64),
        "eps": np.array(epsilon, np.float32),
        "w": rng.normal(size=changes.get("weight", [width])).astype(np.float32),
        "one": np.array(1, np.float32),
    }
    squared = ["x", "two"] if square == "Pow" else ["x", "x"]
    whole: Nodes = [
        (square, squared, ["sq"], {}),
        (changes.get("mean", "ReduceMean"), ["sq", "axes"], ["m"], {"keepdims": 1}),
        ("Add", ["m", changes.get("added", "eps")], ["e"], {}),
        ("Sqrt", ["e"], ["r"], {}),
    ]
    x = changes.get("divided", "x")
    if x != "x":
        whole.append(("Add", ["x", "one"], [x], {}))
    if form == "Div":
        whole.append(("Div", [x, "r"], ["q"], {}))
    else:
        factors = [x, "i"] if form == "Mul" else ["i", x]
        whole += [("Reciprocal", ["r"], ["i"], {}), ("Mul", factors, ["q"], {})]
    whole.append(("Mul", ["w", "q"] if weight_first else ["q", "w"], ["y"], {}))
    shapes: dict[str, list[int | str]] = {n: [*shape] for n in ("x", "y", "q", "sq", "other")}
    outputs = {"y": shapes["y"]}
    if changes.get("shown"):
        outputs["q"] = shapes["q"]
    inner = {n: s for n, s in shapes.items() if n not in ("x", *outputs)}
    return graph(whole, constants, {"x": shapes["x"]}, outputs, inner)


def normalised(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * weight


@given(
    st.integers(1, 70),
    st.integers(2, 4),
    st.sampled_from(["Pow", "Mul"]),
    st.sampled_from(["Div", "Mul", "reversed Mul"]),
    st.booleans(),
    st.sampled_from([1e-6, 1e-5, 0.1]),
)
@settings(deadline=None, max_examples=40)
def test_root_mean_square_norms_are_one_operator(
    width: int, rank: int, square: str, form: str, weight_first: bool, epsilon: float
) -> None:
    model = root_mean_square(width, rank, square, form, weight_first, epsilon)
    changed = with_root_mean_squares(model)
    assert kinds(changed) == [SIMPLIFIED]
    assert [t.name for t in changed.graph.initializer] == ["w"]
    onnx.checker.check_model(known_to_onnx(changed))
    shape = (2, 3, 5)[: rank - 1]
    x = np.random.default_rng(rank).normal(size=(*shape, width)).astype(np.float32)
    weight = numpy_helper.to_array(changed.graph.initializer[0])
    expected = normalised(x, weight, epsilon)
    np.testing.assert_allclose(run(changed, {"x": x})[0], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"axis": 1},
        {"power": 3},
        {"mean": "ReduceSum"},
        {"added": "m"},
        {"divided": "other"},
        {"weight": [1]},
        {"weight": [1, 1, 8]},
        {"shown": True},
    ],
    ids=str,
)
def test_what_is_almost_such_a_norm_is_left_alone(changes: dict[str, Any]) -> None:
    model = root_mean_square(8, **changes)
    assert run(model, {"x": np.ones((1, 2, 8), np.float32)})
    assert with_root_mean_squares(model) is model


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_in_half_precision_a_norm_has_no_casts_and_sums_in_float32(scale: float) -> None:
    """Squares of 300 are beyond float16."""
    model = with_root_mean_squares(root_mean_square(64, epsilon=1e-6))
    product = helper.make_node("MatMul", ["x0", "v"], ["x"], "product")
    model.graph.node.insert(0, product)
    rng = np.random.default_rng(3)
    v = rng.normal(size=(64, 64)).astype(np.float32) / 8
    model.graph.initializer.append(numpy_helper.from_array(v, "v"))
    model.graph.input[0].name = "x0"
    made = half(model, "fp16", None, NORMS)
    assert kinds(made) == ["Cast", "MatMul", SIMPLIFIED, "Cast"]
    x = (scale * rng.normal(size=(2, 3, 64))).astype(np.float32)
    weight = numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "w"))
    expected = normalised(x.astype(np.float64) @ v, weight, 1e-6)
    (found,) = run(made, {"x0": x})
    assert np.abs(found - expected).max() < 4e-3 * np.abs(expected).max()


def residual(
    kind: str,
    dtype: str,
    width: int,
    bias: str = "",
    both: bool = True,
    beta: bool = True,
    **changes: Any,
) -> onnx.ModelProto:
    """y = norm(a + b [+ c]), and the sum where ``both``; ``changes`` make it something else."""
    rng = np.random.default_rng(width)
    rank = changes.get("rank", 3)
    shape = [*["b", "t", "h"][: rank - 1], width]
    element = np.dtype(dtype)
    constants = {
        n: rng.normal(size=changes.get(n, [width])).astype(element) for n in ("w", "beta", "c")
    }
    nodes: Nodes = []
    parts = ["a", "b"]
    if bias:
        nodes.append(("Add", [parts[bias == "b"], "c"], ["biased"], {}))
        parts[bias == "b"] = "biased"
    parameters = ["w", "beta"] if kind == LAYER and beta else ["w"]
    nodes += [
        (changes.get("sum", "Add"), parts, ["s"], {}),
        (kind, ["s", *parameters], ["y"], {"axis": changes.get("axis", -1), "epsilon": 1e-3}),
    ]
    inputs: dict[str, list[int | str]] = {"a": [*shape], "b": [*changes.get("other", shape)]}
    outputs: dict[str, list[int | str]] = {"y": [*shape]} | ({"s": [*shape]} if both else {})
    inner = {n: [*shape] for n in ("s", "biased") if n not in outputs}
    if not bias:
        constants.pop("c")
        inner.pop("biased")
    if len(parameters) == 1:
        constants.pop("beta")
    return graph(nodes, constants, inputs, outputs, inner, dtype)


@given(
    st.sampled_from(sorted(NORMS)),
    st.sampled_from(sorted(TYPES)),
    st.integers(1, 70),
    st.sampled_from(["", "a", "b"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 200.0]),
)
@settings(deadline=None, max_examples=60)
def test_a_norm_of_a_sum_is_one_operator(
    kind: str, dtype: str, width: int, bias: str, both: bool, beta: bool, scale: float
) -> None:
    model = residual(kind, dtype, width, bias, both, beta)
    changed = with_residuals(model)
    assert kinds(changed) == [f"Skip{kind}"] and changed.graph.node[0].domain == MICROSOFT
    onnx.checker.check_model(known_to_onnx(changed))
    rng = np.random.default_rng(width)
    feeds = {n: (scale * rng.normal(size=(2, 3, width))).astype(dtype) for n in ("a", "b")}
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    total = feeds["a"].astype(np.float64) + feeds["b"] + values.get("c", 0)
    centred = total - total.mean(-1, keepdims=True) if kind == LAYER else total
    rows = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    expected = [rows * values["w"] + values.get("beta", 0), *([total] if both else [])]
    step = 2e-3 if dtype == "float16" else 3e-6
    for found, wanted in zip(run(changed, feeds), expected, strict=True):
        # A row of numbers alike has nothing left of its digits.
        largest = max(np.abs(wanted).max(), 1.0 if width > 2 else np.inf)
        assert np.abs(found - wanted).max() <= step * largest


@pytest.mark.parametrize(
    "model",
    [
        residual(LAYER, "float32", 8, other=[1, "t", 8]),
        residual(LAYER, "float32", 8, axis=1),
        residual(LAYER, "float32", 8, sum="Sub"),
        residual(LAYER, "float32", 8, rank=4),
        residual(SIMPLIFIED, "float32", 8, w=[1, 8]),
        residual(SIMPLIFIED, "float32", 8, rank=2),
    ],
    ids=["broadcast", "another axis", "a difference", "four axes", "another weight", "two axes"],
)
def test_what_is_almost_a_residual_is_left_alone(model: onnx.ModelProto) -> None:
    assert with_residuals(model) is model


def test_bfloat16_has_no_such_operator() -> None:
    model = residual(LAYER, "float32", 8)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    for tensor in model.graph.initializer:
        tensor.data_type = TensorProto.BFLOAT16
    assert with_residuals(model) is model


def test_a_sum_with_two_norms_is_computed_once() -> None:
    """The second one reads the sum that the first gives."""
    model = residual(SIMPLIFIED, "float32", 8)
    second = helper.make_node(SIMPLIFIED, ["s", "w"], ["z"], "second", axis=-1, epsilon=1e-3)
    model.graph.node.append(second)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["b", "t", 8]))
    changed = with_residuals(model)
    assert kinds(changed) == [f"Skip{SIMPLIFIED}", SIMPLIFIED]
    x = np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)
    y, _, z = run(changed, {"a": x, "b": 2 * x})
    np.testing.assert_allclose(y, z, rtol=1e-5)


def nodes_of(model: onnx.ModelProto, *kinds_: str) -> int:
    return sum(node.op_type in kinds_ for node in model.graph.node)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_layers_of_a_language_model_have_ten_nodes(
    converted: Callable[..., Any], precision: str
) -> None:
    """As the proof of the conversion says, they compute the same."""
    folder = converted("language_model", target="ort-cuda", precision=precision)
    model = onnx.load_model(str(folder / "model.onnx"))
    assert nodes_of(model, f"Skip{LAYER}") == (0 if precision == "bf16" else 4)
    products = nodes_of(model, "MatMul")
    assert products == (13 if precision == "fp32" else 9)  # queries, keys and values are one
    if precision == "fp16":
        assert nodes_of(model, "Cast") <= 13
