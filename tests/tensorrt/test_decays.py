"""A decay in two factors is one decay per key channel to plugins."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.linear_attention import INPUTS, SCALE, LinearAttentionSpec
from linexport.plugins.ops.registry import attach_functions, linexport_nodes, register_schemas
from linexport.targets.base import OrtSession
from linexport.targets.trt.decays import multiply_out

HEADS, D_K, D_V = 3, 4, 5
SHAPES = {
    "query": ("B", "T", D_K),
    "key": ("B", "T", D_K),
    "value": ("B", "T", HEADS * D_V),
    "decay": ("B", "T", HEADS),
}


def model(rates: np.ndarray) -> onnx.ModelProto:
    register_schemas()
    spec = LinearAttentionSpec(1, HEADS, "gated", scale=0.5)
    given = [name if name in SHAPES else "" for name in INPUTS]
    node = helper.make_node(
        "LinearAttention",
        [*given, *[""] * 4, SCALE],
        ["output"],
        name="attention",
        domain="linexport",
        **spec.attributes(),
    )
    typed = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in SHAPES.items()]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ("B", "T", HEADS * D_V))
    stored = numpy_helper.from_array(rates, SCALE)
    graph = helper.make_graph([node], "test", typed, [output], [stored])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_nodes_have_the_product_of_the_factors() -> None:
    rng = np.random.default_rng(0)
    rates = -np.abs(rng.standard_normal((HEADS, D_K))).astype(np.float32)
    before = model(rates)
    after = multiply_out(before)
    [(node, _, view)] = linexport_nodes(after)
    assert len(node.input) == INPUTS.index("decay") + 1
    assert view.shapes["decay"] == ("B", "T", HEADS * D_K)
    fed = {
        name: np.abs(rng.standard_normal((2, 70, shape[-1]))).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    results = []
    for graph in (before, after):
        attach_functions(graph)
        onnx.checker.check_model(graph, full_check=True)
        results.append(OrtSession(graph.SerializeToString(), 1).run(fed)["output"])
    np.testing.assert_array_equal(*results)


def test_other_models_stay_as_they_are() -> None:
    plain = multiply_out(model(np.zeros((HEADS, D_K), np.float32)))
    assert multiply_out(plain) == plain
