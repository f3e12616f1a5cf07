"""Graphs that read quantised weights, beside the matrices that they store."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from linexport.quantization import quantisable
from linexport.quantization.block_quantisation import Grid, nearest
from linexport.quantization.by_target import form_of
from linexport.quantization.cuda import cuda_model
from linexport.quantization.engines import engine_model
from linexport.quantization.form import TABLE_BLOCK, Rewrite
from linexport.quantization.portable import portable_model
from linexport.quantization.rewrite import quantised_model
from linexport.targets.base import OrtSession


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [40, 44, 64, 128, 160, 256])
def test_a_tied_table_of_any_width_is_looked_up_and_multiplied(width: int, bits: int) -> None:
    table = np.random.default_rng(width).standard_normal((50, width)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "turned"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("rows", width), ("logits", 50))
    ]
    stored = onnx.numpy_helper.from_array(table, "table")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [ids], outputs, [stored]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    [weight], _ = quantisable.find(model, {"table": table})
    grid = form_of("ort", "int4").grid(weight, bits, "float32")
    assert (grid.block == TABLE_BLOCK) is (bits == 8 and width % TABLE_BLOCK == 0)
    assert form_of("ort", "int8").grid(weight, bits, "float32").block == quantisable.BLOCK
    found = nearest(table, grid)
    made = quantised_model(model, {"table": SimpleNamespace(weight=weight, quantised=found)})
    for native in (False, True):
        session = OrtSession(made.SerializeToString(), 1, native=native)
        outputs = session.run({"ids": np.asarray([3, 0, 49])})
        np.testing.assert_allclose(outputs["rows"], found.matrix()[[3, 0, 49]], rtol=1e-6)
        expected = outputs["rows"] @ found.matrix().T  # with inputs rounded to 8 bits
        np.testing.assert_allclose(outputs["logits"], expected, atol=0.02 * np.abs(expected).max())


def gemm(turned: bool, bias: bool, **changes: float) -> tuple[onnx.ModelProto, np.ndarray]:
    """A Gemm with a weight, and that."""
    weight = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    stored = [onnx.numpy_helper.from_array(weight.T.copy() if turned else weight, "w")]
    stored += [onnx.numpy_helper.from_array(np.arange(40, dtype=np.float32), "c")] * bias
    given = ["x", "w", *(["c"] * bias)]
    node = helper.make_node("Gemm", given, ["y"], transB=int(turned), **changes)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 40])
    graph = helper.make_graph([node], "g", [x], [y], stored)
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), weight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", [quantised_model, portable_model, cuda_model, engine_model])
def test_a_gemm_is_a_product_and_its_bias(form: Rewrite, turned: bool, bias: bool) -> None:
    model, weight = gemm(turned, bias)
    values = {"w": weight.T if turned else weight}
    [found], _ = quantisable.find(model, values)
    own = nearest(found.matrix(values["w"]), Grid(4, 32, symmetric=True, positive=True))
    made = form(model, {"w": SimpleNamespace(weight=found, quantised=own)})
    assert {n.op_type for n in made.graph.node} & {"Gemm"} == set()
    session = onnxruntime.InferenceSession(made.SerializeToString())
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    expected = x @ own.matrix().T + bias * np.arange(40)
    [y] = session.run(None, {"x": x})
    np.testing.assert_allclose(y, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("changes", [{"alpha": 2.0}, {"beta": 0.5}, {"transA": 1}])
def test_a_gemm_that_scales_or_turns_is_left(changes: dict[str, float]) -> None:
    model, weight = gemm(False, True, **changes)
    assert quantisable.find(model, {"w": weight}) == ([], [])


@pytest.mark.parametrize("chooser", ["Softmax", "Sigmoid"])
def test_a_router_is_left_and_what_it_reads_is_not(chooser: str) -> None:
    values = {name: np.ones((64, 64), np.float32) for name in ("projection", "router")}
    nodes = [
        helper.make_node("MatMul", ["x", "projection"], ["y"]),
        helper.make_node("Add", ["x", "y"], ["residual"]),
        helper.make_node("Gemm", ["residual", "router"], ["scores"]),
        helper.make_node(chooser, ["scores"], ["shares"]),
        helper.make_node("TopK", ["shares", "k"], ["share", "index"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("index", TensorProto.INT64, ["n", 2])],
        [onnx.numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    found, kept = quantisable.find(helper.make_model(graph), values)
    assert [w.name for w in found] == ["projection"]
    assert [(k.name, k.reason) for k in kept] == [("router", quantisable.ROUTER)]
