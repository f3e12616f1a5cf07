"""Weights that travel beside their graph, and the files they end in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import linexport
from linexport import passes
from linexport.artifact import write
from linexport.graph import external_data, surgeon


@pytest.fixture
def model() -> onnx.ModelProto:
    """x W^T + b, with W large and b small."""
    choose = np.random.default_rng(0)
    large, small = choose.normal(size=(600, 500)), choose.normal(size=600)
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "t"], ["p"]),
            helper.make_node("Add", ["p", "b"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 500])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 600])],
        [numpy_helper.from_array(np.float32(v), k) for k, v in (("w", large), ("b", small))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def output(model: onnx.ModelProto | Path, width: int = 500) -> np.ndarray:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": np.ones((2, width), np.float32)})[0]
    return found


def test_weights_come_back_as_they_were(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    apart = external_data.externalize(model)
    assert list(apart) == ["w"] and model.ByteSize() < 2**14
    whole = external_data.with_weights(model, apart)
    assert whole == onnx.ModelProto.FromString(before)


def test_an_outline_is_valid_if_the_model_is(model: onnx.ModelProto) -> None:
    external_data.externalize(model)
    onnx.checker.check_model(external_data.externals_as_inputs(model))
    model.graph.node[1].op_type = "NoSuchOperator"
    with pytest.raises(onnx.checker.ValidationError, match="NoSuchOperator"):
        onnx.checker.check_model(external_data.externals_as_inputs(model))


def test_passes_leave_them_apart_and_copy_none(model: onnx.ModelProto) -> None:
    expected = output(model)
    apart = external_data.externalize(model)
    rewritten = passes.rewrite(model, passes.STATELESS, apart)
    [(name, values)] = rewritten.weights.items()
    assert values.shape == (500, 600) and np.shares_memory(values, apart["w"])
    assert rewritten.model.ByteSize() < 2**14
    assert name in {tensor.name for tensor in rewritten.model.graph.initializer}
    np.testing.assert_array_equal(
        output(external_data.with_weights(rewritten.model, {name: values})), expected
    )


@pytest.mark.parametrize("limit", [0, 10**9])
def test_written_in_the_file_or_beside_it(
    model: onnx.ModelProto, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = output(model)
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", limit)
    apart = external_data.externalize(model)
    path = write.save_model(model, tmp_path, apart)
    onnx.checker.check_model(str(path))
    assert len(list(tmp_path.iterdir())) == (1 if limit else 2)
    np.testing.assert_array_equal(output(path), expected)


@pytest.mark.parametrize("source", ["language_model", "beside_softmax"])
@pytest.mark.parametrize("target", ["ort", "ort-cuda"])
def test_weights_that_travel_apart_become_those_of_an_artifact(
    factories: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    target: str,
) -> None:
    """Nothing between the trace and the file reads the values of a weight that is not there."""
    monkeypatch.setattr("linexport.trace.graph.LARGE", 2**7)
    for function in (external_data.externalize, surgeon.externalize_constants):
        monkeypatch.setattr(function, "__defaults__", (2**7,))
    made = tmp_path / "artifact"
    given = {"target": target, "bench": False, "threads": 1}
    manifest = linexport.convert(factories.source(source), made, **given)
    assert manifest.status == "ok" and manifest.states
    traced = onnx.load(str(made / "model.onnx"), load_external_data=False)
    assert max(t.ByteSize() for t in traced.graph.initializer) > 2**7


@pytest.mark.parametrize("beside", ["Relu(s)", "MatMul(s, w)"])
def test_passes_read_those_that_bodies_use(beside: str) -> None:
    """Squares are evaluated, as masks are: here one of a body, which its graph has too or not."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[n, 512] x) => (float[512] y) {'
        "start = Constant <value = float[1] {0}> ()  wide = Constant <value = int64[1] {512}> ()"
        "h = Expand(start, wide)"
        "s = Scan <num_scan_inputs = 1, body = step (float[512] a, float[512] b) => (float[512] c)"
        f" {{ m = MatMul(a, w)  d = Add(m, b)  c = Tanh(d) }}> (h, x)  y = {beside} }}"
    )
    square = np.random.default_rng(0).normal(size=(512, 512)) / 20
    model.graph.initializer.append(numpy_helper.from_array(np.float32(square), "w"))
    expected = output(model, 512)
    apart = external_data.externalize(model)
    assert list(apart) == ["w"]
    rewritten = passes.rewrite(model, passes.STATELESS, apart)
    got = output(external_data.with_weights(rewritten.model, rewritten.weights), 512)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT4])
def test_weights_of_any_width_are_read_one_at_a_time(tmp_path: Path, kind: int) -> None:
    """In the file and beside it; two elements of four bits share a byte there."""
    values = np.random.default_rng(0).integers(-8, 8, (33, 65))
    values = values.astype(helper.tensor_dtype_to_np_dtype(kind))
    graph = helper.make_graph([], "g", [], [], [external_data.external_initializer("w", values)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    for name, data in (("whole.onnx", None), ("beside.onnx", tmp_path / "beside.data")):
        external_data.save(model, {"w": values}, tmp_path / name, data)
        found = external_data.read_mapped(tmp_path / name)[1]["w"]
        assert found.dtype == values.dtype and np.array_equal(found, values)
