"""Convolutions become ones on tokens before channels: no transposes, and states in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.targets.base import OrtSession
from linexport.targets.trt.convolutions import tokens_first
from linexport.targets.trt.precision import ELEMENTS, half

CHANNELS, SIZE = 6, 4
TURN = {"perm": [0, 2, 1]}


def model(between: str) -> onnx.ModelProto:
    """A convolution between transposes, between gates that are (LFM2), or alone, with its state."""
    register_schemas()
    width = 3 * CHANNELS if between == "gates" else CHANNELS
    tokens, channels = ["B", "T", width], ["B", CHANNELS, "T"]
    convolution = helper.make_node(
        "CausalConvWithState",
        ["given", "w", "", "past"],
        ["made", "present"],
        "conv",
        domain="linexport",
        activation="silu",
    )
    given, made = tokens, ["B", "T", CHANNELS]
    if between == "nothing":
        convolution.input[0], convolution.output[0] = "x", "y"
        nodes, given, made = [convolution], channels, channels
    elif between == "transposes":
        nodes = [
            helper.make_node("Transpose", ["x"], ["given"], "first", **TURN),
            convolution,
            helper.make_node("Transpose", ["made"], ["turned"], "last", **TURN),
            helper.make_node("Neg", ["turned"], ["y"]),
        ]
    else:
        nodes = [
            helper.make_node("Transpose", ["x"], ["wide"], "first", **TURN),
            helper.make_node("Split", ["wide"], ["a", "b", "c"], "split", axis=1, num_outputs=3),
            helper.make_node("Mul", ["a", "b"], ["given"]),
            convolution,
            helper.make_node("Mul", ["made", "c"], ["gated"]),
            helper.make_node("Transpose", ["gated"], ["turned"], "last", **TURN),
            helper.make_node("Neg", ["turned"], ["y"]),
        ]
    state = ["B", CHANNELS, SIZE - 1]

    def typed(name: str, shape: list[str | int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inside = [] if between == "nothing" else [typed(n, channels) for n in ("given", "made")]
    weight = np.random.default_rng(0).normal(size=(CHANNELS, 1, SIZE)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "test",
        [typed("x", given), typed("past", state)],
        [typed("y", made), typed("present", state)],
        [numpy_helper.from_array(weight, "w")],
        value_info=inside,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=opsets, ir_version=10)
    )


LEFT = {"transposes": 0, "gates": 0, "nothing": 2}
"""Transposes that are left."""


@pytest.mark.parametrize("between", LEFT)
def test_it_computes_the_same_and_transposes_around_it_are_gone(between: str) -> None:
    before = model(between)
    after = tokens_first(before)
    kinds = [node.op_type for node in after.graph.node]
    assert "CausalConvTokens" in kinds and "CausalConvWithState" not in kinds
    assert kinds.count("Transpose") == LEFT[between]
    rng, sizes = np.random.default_rng(1), {"B": 2, "T": 9}
    fed = {
        i.name: rng.normal(
            size=[sizes.get(d.dim_param) or d.dim_value for d in i.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for i in before.graph.input
    }
    for length in (9, 1):
        axis = 2 if between == "nothing" else 1
        fed["x"] = np.take(fed["x"], range(length), axis)
        results = []
        for graph in (before, after):
            attach_functions(graph)
            onnx.checker.check_model(graph, full_check=True)
            results.append(OrtSession(graph.SerializeToString(), 1).run(fed))
        for name in ("y", "present"):
            np.testing.assert_allclose(*(r[name] for r in results), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ELEMENTS)
def test_its_states_are_not_cast(precision: str) -> None:
    """Activations are halves; the state goes into the node and out of it as the graph has it."""
    made = half(tokens_first(model("transposes")), precision)
    (node,) = (n for n in made.graph.node if n.op_type == "CausalConvTokens")
    assert node.input[3] == "past" and node.output[1] == "present"
    types = {i.name: i.type.tensor_type.elem_type for i in made.graph.value_info}
    assert types[node.input[0]] == ELEMENTS[precision]
    onnx.checker.check_model(made, full_check=True)


def test_models_without_one_stay_as_they_are() -> None:
    plain = model("transposes")
    del plain.graph.node[1]
    assert tokens_first(plain) is plain
