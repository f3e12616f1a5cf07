"""Sums over tokens that nothing multiplies: one op in the layout of the model, or as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from linexport import passes
from linexport.graph import states
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import attach_functions

node = helper.make_node
Dims = list[str | int]


def graph(nodes: list[onnx.NodeProto], dims: Dims, **constants: object) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "g",
        [value("x", 1, dims)],
        [value("y", 1, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    imports = [helper.make_opsetid("", 18)]
    model = helper.make_model(made, opset_imports=imports, ir_version=9)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def cumsum(axis: int, dims: Dims, **attributes: int) -> onnx.ModelProto:
    return graph([node("CumSum", ["x", "a"], ["y"], "sum", **attributes)], dims, a=np.array(axis))


def triangle() -> onnx.ModelProto:
    """A product with a triangle of ones."""
    nodes = [
        node("Shape", ["x"], ["n"], "n", start=1, end=2),
        node("Concat", ["n", "n"], ["square"], "square", axis=0),
        node("Expand", ["one", "square"], ["ones"], "ones"),
        node("Trilu", ["ones"], ["lower"], "lower", upper=0),
        node("MatMul", ["lower", "x"], ["y"], "sum"),
    ]
    return graph(nodes, ["B", "T", 6], one=np.ones((1, 1), np.float32))


def gated() -> onnx.ModelProto:
    """Values times a number of their token, added up and doubled."""
    nodes = [
        node("Slice", ["x", "zero", "one", "last"], ["g"], "first"),
        node("Sigmoid", ["g"], ["s"], "gate"),
        node("Mul", ["x", "s"], ["p"], "gated"),
        node("CumSum", ["p", "axis"], ["c"], "sum"),
        node("Mul", ["c", "two"], ["y"], "doubled"),
    ]
    numbers = {"zero": [0], "one": [1], "last": [-1]}
    given = {k: np.array(v) for k, v in numbers.items()}
    return graph(nodes, ["B", "T", 6], **given, axis=np.array(1), two=np.float32(2))


def run(model: onnx.ModelProto, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    attach_functions(whole)
    session = onnxruntime.InferenceSession(
        whole.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, fed), strict=True))


@pytest.mark.parametrize(
    ("model", "place", "shape"),
    [
        (cumsum(1, ["B", "T", 6]), 1, ("B", 6)),
        (cumsum(1, ["B", "T", 6], exclusive=1), 1, ("B", 6)),
        (cumsum(-2, ["B", 3, "T", 2]), 2, ("B", 3, 2)),
        (cumsum(1, ["B", "T", 3, 2]), 1, ("B", 3, 2)),
        (cumsum(2, ["B", 6, "T"]), 2, ("B", 6)),
        (triangle(), 1, ("B", 6)),
        (gated(), 1, ("B", 6)),
    ],
    ids=["channels", "exclusive", "heads first", "heads", "tokens last", "triangle", "gated"],
)
def test_a_sum_is_one_op_with_a_state_and_nothing_is_moved(
    model: onnx.ModelProto, place: int, shape: tuple[object, ...]
) -> None:
    rewritten = passes.rewrite(model)
    assert not rewritten.findings.rejected and not rewritten.findings.unmatched
    nodes = rewritten.model.graph.node
    assert [n.op_type for n in nodes if n.domain == DOMAIN] == ["CumulativeSum"]
    assert not {"Transpose", "Reshape", "MatMul"} & {n.op_type for n in nodes}
    [state] = states.find_states(rewritten.model)
    assert state.shape == shape
    sizes = [4 if n == "T" else 2 if n == "B" else n for n in dims_of(model)]
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    expected = run(model, {"x": x})["y"]
    past, found = state.start(2), []
    for part in np.split(x, [1, 1, 3], place):  # one piece of no token
        outputs = run(rewritten.model, {"x": part, state.past: past})
        past = outputs[state.present]
        found.append(outputs["y"])
    np.testing.assert_allclose(np.concatenate(found, place), expected, rtol=1e-5, atol=1e-6)


def dims_of(model: onnx.ModelProto) -> Dims:
    dims = model.graph.input[0].type.tensor_type.shape.dim
    return [d.dim_param or d.dim_value for d in dims]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (cumsum(1, ["B", "H", "W", 4]), "along one of several dynamic sizes"),
        (cumsum(1, ["B", "T", 6], reverse=1), "over later tokens"),
    ],
    ids=["several sizes", "later tokens"],
)
def test_a_sum_without_a_state_of_a_fixed_size_stays_as_it_is(
    model: onnx.ModelProto, reason: str
) -> None:
    rewritten = passes.rewrite(model)
    assert [n.op_type for n in rewritten.model.graph.node] == ["CumSum"]
    [found] = rewritten.findings.unmatched
    assert reason in found.reason


def test_a_sum_along_a_fixed_axis_is_not_touched() -> None:
    model = cumsum(2, ["B", "T", 5, 4])
    assert [n.op_type for n in passes.rewrite(model).model.graph.node] == ["CumSum"]
