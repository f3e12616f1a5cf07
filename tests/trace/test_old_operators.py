"""Operators of old operator sets: raised, folded where they are constant, and equal to the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from linexport.passes import simplify
from linexport.sources import load_model
from linexport.trace.normalize import normalise

random = np.random.default_rng(0)
X = random.standard_normal((2, 3, 4, 4)).astype(np.float32)
CHANNEL = [random.random(3).astype(np.float32) + 0.5 for _ in range(4)]
TWICE = np.float32([1, 1, 2, 2])

OLD: list[tuple[str, int, list[Any], dict[str, Any], int]] = [
    ("Upsample", 8, [X], {"scales": [1.0, 1.0, 2.0, 2.0]}, 1),
    ("Upsample", 8, [X], {"scales": [1.0, 1.0, 1.5, 2.3]}, 1),
    ("Upsample", 9, [X, TWICE], {"mode": "linear"}, 1),
    ("Resize", 10, [X, TWICE], {"mode": "linear"}, 1),
    ("Resize", 10, [X, np.float32([1, 1, 1.5, 2.3])], {}, 1),
    ("Resize", 10, [X, np.float32([1, 1, 0.7, 0.6])], {}, 1),
    ("BatchNormalization", 8, [X, *CHANNEL], {}, 1),
    ("BatchNormalization", 13, [X, *CHANNEL], {}, 1),
    ("Dropout", 10, [X], {"ratio": 0.3}, 1),
    ("Clip", 8, [X], {"min": -0.5, "max": 0.5}, 1),
    ("Pad", 8, [X], {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": 2.0}, 1),
    ("Slice", 9, [X], {"starts": [0, 1], "ends": [2, 3], "axes": [0, 1]}, 1),
    ("Split", 11, [X], {"axis": 3, "split": [1, 3]}, 2),
    ("TopK", 9, [X], {"k": 2, "axis": 3}, 2),
    ("Softmax", 11, [X], {"axis": 2}, 1),
    ("Hardmax", 11, [X], {"axis": 1}, 1),
    ("Hardmax", 12, [X], {"axis": 3}, 1),
    ("ReduceSum", 12, [X], {"axes": [1, -1], "keepdims": 0}, 1),
    ("Scatter", 10, [X[0, 0], np.array([[1, 0, 2, 3]]), X[1, 0, :1]], {}, 1),
    ("MaxPool", 12, [X], {"kernel_shape": [2, 2]}, 2),
    ("LRN", 12, [X], {"size": 3}, 1),
    ("GlobalLpPool", 12, [X], {}, 1),
    ("MeanVarianceNormalization", 12, [X], {}, 1),
    ("QuantizeLinear", 10, [X, np.float32(0.01), np.uint8(3)], {}, 1),
    ("DequantizeLinear", 10, [(X * 9).astype(np.int8), np.float32(0.1), np.int8(3)], {}, 1),
    ("DynamicQuantizeLinear", 11, [X], {}, 3),
]


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "of an input"])
@pytest.mark.parametrize(
    ("op", "opset", "values", "attributes", "outputs"), OLD, ids=[f"{o[0]}-{o[1]}" for o in OLD]
)
def test_an_old_operator_gives_what_the_file_gives(
    tmp_path: Path,
    op: str,
    opset: int,
    values: list[Any],
    attributes: dict[str, Any],
    outputs: int,
    constant: bool,
) -> None:
    stored = {f"i{n}": np.asarray(value) for n, value in enumerate(values)}
    made = [f"o{n}" for n in range(outputs)]
    fed = {} if constant else {"i0": stored.pop("i0")}
    names = [*fed, *stored]
    kinds = {n: helper.np_dtype_to_tensor_dtype(v.dtype) for n, v in fed.items()}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node(op, names, made, **attributes),
            *(helper.make_node("Identity", [name], [f"{name}/copy"]) for name in made),
            helper.make_node("Relu", ["x"], ["y"]),
        ],
        "g",
        [value("x", 1, ["B"]), *(value(n, kinds[n], v.shape) for n, v in fed.items())],
        [helper.make_empty_tensor_value_info(f"{name}/copy") for name in made]
        + [value("y", 1, ["B"])],
        [numpy_helper.from_array(v, n) for n, v in stored.items()],
    )
    imports = [helper.make_opsetid("", opset)]
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=imports, ir_version=8)
    )
    onnx.save(model, tmp_path / "old.onnx")
    loaded = load_model(tmp_path / "old.onnx")
    assert loaded.graph is not None
    raised = gs.import_onnx(normalise(loaded.graph)[0])
    simplify.run(raised)
    result = gs.export_onnx(raised.cleanup().toposort(), do_type_check=False)
    assert (op in [node.op_type for node in result.graph.node]) <= (op == "Dropout" or not constant)
    fed["x"] = np.ones(3, np.float32)
    expected, got = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, {i.name: fed[i.name] for i in m.graph.input}
        )
        for m in (model, result)
    )
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
