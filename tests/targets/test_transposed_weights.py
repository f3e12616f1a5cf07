"""Tied heads without a transposed copy of their table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from linexport.artifact import write
from linexport.targets.base import OrtSession
from linexport.targets.lowering.transposed_weights import SMALLEST, with_transposed_weights

WIDTH, WORDS = 64, SMALLEST // 64

SHAPES = {
    "logits": ["batch", "seq", None],
    "turned": [WIDTH, None],
    "other": [None, None],
    "more": ["batch", "seq", None],
}


def tied(*more: onnx.NodeProto, shown: bool = False, words: int = WORDS) -> onnx.ModelProto:
    table = np.random.default_rng(0).normal(size=(words, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["logits"]),
        *more,
    ]
    outputs = ["logits", *(["turned"] if shown else []), *(n.output[0] for n in more)]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "seq"])],
        [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, SHAPES[name])
            for name in outputs
        ],
        [numpy_helper.from_array(table, "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("low_memory", [True, False])
def test_logits_are_the_same(external: bool, low_memory: bool, tmp_path: Path) -> None:
    model, ids = tied(), np.random.default_rng(1).integers(0, WORDS, (2, 5))
    exact = np.asarray(numpy_helper.to_array(model.graph.initializer[0]), np.float64)
    path = write.save_model(model, tmp_path, above=0 if external else 2**30)
    session = OrtSession(path, threads=1, low_memory=low_memory, logits="logits")
    found = session.run({"ids": ids, "logits_to_keep": np.array([2])})["logits"]
    wanted = exact[ids[:, -2:]] @ exact.T
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_the_table_has_no_second_copy(tmp_path: Path) -> None:
    """By the graph that ONNX Runtime runs: none of its weights has the transposed shape."""
    source = tmp_path / "source"
    source.mkdir()
    path = write.save_model(tied(), source, above=0)
    session = OrtSession(path, threads=1, profile=tmp_path)
    session.inner.end_profiling()
    ran = onnx.load(str(tmp_path / "optimized.onnx"), load_external_data=False)
    assert [t.dims for t in ran.graph.initializer if len(t.dims) == 2] == [[WORDS, WIDTH]]
    assert [n.op_type for n in ran.graph.node] == ["Gather", "FusedMatMul"]


@pytest.mark.parametrize(
    "model",
    [
        tied(shown=True),
        tied(helper.make_node("Relu", ["turned"], ["other"])),
        tied(helper.make_node("MatMul", ["turned", "table"], ["other"])),
        tied(words=WORDS - 1),
    ],
    ids=["shown", "read elsewhere", "on the left", "small"],
)
def test_others_are_left_as_they_are(model: onnx.ModelProto) -> None:
    assert with_transposed_weights(model) is model


def test_a_transpose_that_turns_nothing_is_left_as_it_is() -> None:
    """Of a square matrix its product would be another one of the same shape."""
    model = tied()
    model.graph.node[1].attribute[0].ints[:] = [0, 1]
    assert with_transposed_weights(model) is model


def test_two_products_read_one_table() -> None:
    model = tied(helper.make_node("MatMul", ["x", "turned"], ["more"]))
    changed = with_transposed_weights(model)
    assert [n.op_type for n in changed.graph.node] == ["Gather", "FusedMatMul", "FusedMatMul"]
    onnx.checker.check_model(model)
    ids = np.array([[3, 1]])
    a, b = (
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"ids": ids})
        for m in (model, changed)
    )
    for expected, found in zip(a, b, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
