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
from linexport.quantization.rewrite import quantised_model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [40, 44, 64])
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
    found = nearest(table, Grid(bits, 32))
    made = quantised_model(model, {"table": SimpleNamespace(weight=weight, quantised=found)})
    session = onnxruntime.InferenceSession(made.SerializeToString())
    rows, logits = session.run(["rows", "logits"], {"ids": np.asarray([3, 0, 49])})
    np.testing.assert_allclose(rows, found.matrix()[[3, 0, 49]], rtol=1e-6)
    expected = rows @ found.matrix().T  # with inputs rounded to 8 bits
    np.testing.assert_allclose(logits, expected, atol=0.02 * np.abs(expected).max())
