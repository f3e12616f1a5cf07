"""The pass that copies dequantised values which bodies read."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from onnx import parser

from linexport.passes import shield_bodies

QUANTISED = """
    q = QuantizeLinear (x, scale, zero)
    d = DequantizeLinear (q, scale, zero)
"""
STORED = "<float scale = {0.1}, int8 zero = {3}, int64[3] shape = {-1, 2, 2}, int64[1] two = {2}>"
HEAD = '<ir_version: 9, opset_import: ["": 18]> g (float[B, 4] x, bool c) => (float[B, 2, 2] y)'
SCAN = """
    y = Scan <num_scan_inputs = 1, body = b (float[2, 2] one) => (float[2, 2] z) {
        z = If (c) <
            then_branch = t () => (float[2, 2] u) { u = Add (one, row) },
            else_branch = e () => (float[2, 2] v) { v = Neg (row) }
        >
    }> (m)
"""
BRANCHES = """
    y = If (c) <
        then_branch = t () => (float[B, 2, 2] u) { u = Relu (m) },
        else_branch = e () => (float[B, 2, 2] v) { v = Neg (m) }
    >
"""


def shielded(body: str) -> tuple[onnx.ModelProto, gs.Graph]:
    model = parser.parse_model(f"{HEAD} {STORED} {{ {QUANTISED} {body} }}")
    onnx.checker.check_model(model)
    graph = gs.import_onnx(model)
    result = shield_bodies.run(graph)
    graph.toposort()
    assert result.modified == any(node.op == "Max" for node in graph.nodes)
    assert not shield_bodies.run(graph).modified
    return model, graph


def computed(model: onnx.ModelProto, x: np.ndarray, chosen: bool, level: str) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x, "c": np.array(chosen)})[0])


@pytest.mark.parametrize(
    "body",
    [
        f"m = Reshape (d, shape) {BRANCHES}",
        f"r = Reshape (d, shape) m = Transpose <perm = [0, 2, 1]> (r) {BRANCHES}",
        f"m = Reshape (d, shape) zero_d = Squeeze (two) row = Gather <axis = 0> (m, zero_d) {SCAN}",
    ],
    ids=["branch", "two moves", "behind another operator"],
)
@pytest.mark.parametrize("chosen", [True, False])
def test_a_graph_opens_as_users_open_it_and_computes_the_same(body: str, chosen: bool) -> None:
    """ONNX Runtime 1.31 and 1.32 end the process on the first two as they are."""
    model, graph = shielded(body)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    expected = computed(model, x, chosen, "ORT_DISABLE_ALL")
    got = computed(gs.export_onnx(graph, do_type_check=False), x, chosen, "ORT_ENABLE_ALL")
    np.testing.assert_array_equal(got, expected)


def test_values_that_a_body_takes_as_inputs_or_computes_are_not_copied() -> None:
    _, graph = shielded(
        """
        m = Reshape (d, shape)
        y = Scan <num_scan_inputs = 1, body = b (float[2, 2] one) => (float[2, 2] z) {
            own = QuantizeLinear (one, scale, zero)
            back = DequantizeLinear (own, scale, zero)
            z = Reshape (back, two_two)
        }> (m)
    """.replace("two_two", "shape_2").replace(
            "m = R", "shape_2 = Concat <axis = 0> (two, two) m = R"
        )
    )
    assert not any(node.op == "Max" for node in graph.nodes)


def test_an_op_of_linexport_reads_a_copy() -> None:
    x = gs.Variable("x", np.float32, ["B", "T", 4])
    numbers = [gs.Constant("s", np.array(0.1, np.float32)), gs.Constant("z", np.array(0, np.int8))]
    values = [gs.Variable(name, np.float32) for name in ("d", "k", "y", "state", "n")]
    q = gs.Variable("q", np.int8)
    shape = gs.Constant("shape", np.array([0, -1, 4]))
    graph = gs.Graph(
        [
            gs.Node("QuantizeLinear", "", {}, [x, *numbers], [q]),
            gs.Node("DequantizeLinear", "", {}, [q, *numbers], [values[0]]),
            gs.Node("Reshape", "", {}, [values[0], shape], [values[1]]),
            gs.Node(
                "LinearAttention", "", {}, [x, values[1], values[1]], values[2:], domain="linexport"
            ),
        ],
        [x],
        [values[2]],
    )
    assert shield_bodies.run(graph).modified
    attention = next(node for node in graph.nodes if node.op == "LinearAttention")
    [copy] = [node for node in graph.nodes if node.op == "Max"]  # one for both of its inputs
    assert [tensor.name for tensor in attention.inputs] == ["x", *[copy.outputs[0].name] * 2]
