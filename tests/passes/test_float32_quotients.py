"""Quotients of sums that leave float16, against a float64 oracle."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from linexport.passes import float32_quotients

HALF, EPS = TensorProto.FLOAT16, 1e-15
TOKENS, WIDTH = 96, 4


def model(division: str, outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """ReLU attention with a column of ones, in float16, with an epsilon that float16 has not."""
    nodes = [
        helper.make_node("Relu", ["q"], ["a"]),
        helper.make_node("Relu", ["k"], ["b"]),
        helper.make_node("Transpose", ["b"], ["bT"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["bT", "v"], ["state"]),
        helper.make_node("MatMul", ["a", "state"], ["numerator"]),
        helper.make_node("ReduceSum", ["bT", "last"], ["column"], keepdims=1),
        helper.make_node("MatMul", ["a", "column"], ["sum"]),
        helper.make_node("Cast", ["eps"], ["eps16"], to=HALF),
        helper.make_node("Add", ["sum", "eps16"], ["denominator"]),
    ]
    if division == "Div":
        nodes.append(helper.make_node("Div", ["numerator", "denominator"], ["y"]))
    else:
        inverse = ["Reciprocal", ["denominator"]] if division == "Reciprocal" else None
        made = inverse or ["Div", ["one", "denominator"]]
        nodes.append(helper.make_node(made[0], made[1], ["inverse"]))
        nodes.append(helper.make_node("Mul", ["numerator", "inverse"], ["y"]))
    info = [helper.make_tensor_value_info(n, HALF, ["B", "T", WIDTH]) for n in ("q", "k", "v")]
    graph = helper.make_graph(
        nodes,
        "quotient",
        info,
        [helper.make_tensor_value_info(n, HALF, None) for n in outputs],
        [
            numpy_helper.from_array(np.float32(EPS), "eps"),
            numpy_helper.from_array(np.float16(1), "one"),
            numpy_helper.from_array(np.array([-1]), "last"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True)


def rewritten(before: onnx.ModelProto) -> onnx.ModelProto:
    graph = gs.import_onnx(before)
    assert float32_quotients.run(graph).modified
    assert not float32_quotients.run(graph).modified
    after = gs.export_onnx(graph)
    onnx.checker.check_model(after, full_check=True)
    return after


def run(made: onnx.ModelProto, fed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    opened = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[np.ndarray] = opened.run(None, fed)
    return found


def drawn(seed: int, size: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (2, TOKENS, WIDTH)
    return {n: (size * rng.standard_normal(shape)).astype(np.float16) for n in ("q", "k", "v")}


def oracle(fed: dict[str, np.ndarray]) -> np.ndarray:
    q, k, v = (fed[n].astype(np.float64) for n in ("q", "k", "v"))
    scores = np.maximum(q, 0) @ np.swapaxes(np.maximum(k, 0), 1, 2)
    return scores @ v / (scores.sum(-1, keepdims=True) + EPS)


@pytest.mark.parametrize("division", ["Div", "Reciprocal", "one over"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.floats(0.25, 2000.0))
def test_quotients_of_any_size_are_those_of_float64_rounded(
    division: str, seed: int, size: float
) -> None:
    fed = drawn(seed, size)
    (got,) = run(rewritten(model(division)), fed)
    expected = oracle(fed)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_values_of_200_leave_float16_without_it() -> None:
    """As the standard defines operators; ONNX Runtime's CPU kernels may keep float32 between."""
    fed = drawn(0, 200.0)
    with np.errstate(all="ignore"):
        before, after = (
            ReferenceEvaluator(made).run(None, fed)[0]
            for made in (model("Div"), rewritten(model("Div")))
        )
    expected = oracle(fed)
    assert not np.isfinite(before).all()
    np.testing.assert_allclose(after, expected, atol=2e-3 * np.abs(expected).max())


def test_a_sum_that_is_an_output_too_keeps_its_type_and_name() -> None:
    fed = drawn(1, 1.0)
    before, after = model("Div", ("y", "sum")), rewritten(model("Div", ("y", "sum")))
    assert [o.name for o in after.graph.output] == ["y", "sum"]
    assert {o.type.tensor_type.elem_type for o in after.graph.output} == {HALF}
    np.testing.assert_allclose(run(after, fed)[1], run(before, fed)[1], rtol=2e-3)


def test_what_is_no_quotient_of_sums_is_left_as_it_is() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["projected"]),
        helper.make_node("Exp", ["projected"], ["e"]),
        helper.make_node("ReduceSum", ["e"], ["sum"], keepdims=1),
        helper.make_node("Div", ["e", "sum"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "softmax",
        [helper.make_tensor_value_info("x", HALF, ["T", 2])],
        [helper.make_tensor_value_info("y", HALF, None)],
        [numpy_helper.from_array(np.ones((2, 2), np.float16), "w")],
    )
    made = onnx.shape_inference.infer_shapes(helper.make_model(graph))
    assert not float32_quotients.run(gs.import_onnx(made)).modified
