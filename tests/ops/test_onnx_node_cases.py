"""ONNX's own node tests for the two operators it shares with linexport (opset 27).

Each case's standard node is rewritten to the linexport domain, a lowering attached, and the model
run on ONNX Runtime against the expected outputs of the case, within the tolerances of the case.
A target's lowering is one more entry of ``LOWERINGS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.node import causal_conv_with_state, linear_attention
from onnx.backend.test.case.test_case import TestCase

from linexport.plugins.ops.op import Lowering, Node, Op
from linexport.plugins.ops.registry import attach_functions
from linexport.targets import ort
from linexport.targets.lowering import kernels
from tests.support import runtimes

Choose = Callable[[onnx.NodeProto, Op, Node], Lowering]


def native(node: onnx.NodeProto, op: Op, view: Node) -> Lowering:
    """ONNX Runtime's kernels."""
    conv = op.name == "CausalConvWithState"
    return kernels.native_conv if conv else kernels.native


def padded(node: onnx.NodeProto, op: Op, view: Node) -> Lowering:
    """The same on heads padded to the widths the kernel is fast at."""
    conv = op.name == "CausalConvWithState"
    return kernels.native_conv if conv else kernels.native_padded


LOWERINGS: list[Any] = [
    pytest.param(lambda node, op, view: op.portable, id="portable"),
    pytest.param(native, id="native"),
    pytest.param(padded, id="native_padded"),
    pytest.param(lambda node, op, view: ort.TARGET.candidates(op, view)[0].write, id="ort_rule"),
]
"""How to lower each node: the ``choose`` argument of ``attach_functions``, in pytest.param."""

# Cases come into being when their module is imported. ``collect_testcases`` imports the modules of
# all operators, which takes several seconds, and returns this same list.
assert causal_conv_with_state and linear_attention
CASES: list[TestCase] = [
    case
    for case in node_cases._NodeTestCases
    if [n.op_type for n in case.model.graph.node] in (["LinearAttention"], ["CausalConvWithState"])
]


def test_every_case_is_here() -> None:
    assert len(CASES) == 27
    assert len({case.name for case in CASES}) == 27
    types = {i.type.tensor_type.elem_type for case in CASES for i in case.model.graph.input}
    assert types == {TensorProto.FLOAT, TensorProto.FLOAT16}


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its one standard node as a linexport node; interface unchanged.

    linexport's LinearAttention has past_normalizer third among the optional inputs, an explicit
    scale, and float32 states: half-precision ones are cast outside of it.
    """
    graph = model.graph
    node = graph.node[0]
    shapes = {
        i.name: [d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in [*graph.input, *graph.output]
    }
    kinds = {i.name: i.type.tensor_type.elem_type for i in [*graph.input, *graph.output]}
    before: list[onnx.NodeProto] = []
    after: list[onnx.NodeProto] = []
    infos: list[onnx.ValueInfoProto] = []
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs, outputs = list(node.input), list(node.output)
    if node.op_type == "LinearAttention":
        attributes.setdefault("update_rule", "gated_delta")
        if not attributes.get("scale"):
            d_k = shapes[inputs[0]][2] // attributes["q_num_heads"]
            attributes["scale"] = d_k**-0.5
        inputs += [""] * (6 - len(inputs))
        if inputs[3] and kinds[inputs[3]] != TensorProto.FLOAT:
            before.append(helper.make_node("Cast", [inputs[3]], ["past"], to=TensorProto.FLOAT))
            infos.append(
                helper.make_tensor_value_info("past", TensorProto.FLOAT, shapes[inputs[3]])
            )
            inputs[3] = "past"
        inputs.insert(4, "")
        if kinds[outputs[1]] != TensorProto.FLOAT:
            after.append(helper.make_node("Cast", ["present"], [outputs[1]], to=kinds[outputs[1]]))
            outputs[1] = "present"
    while not inputs[-1]:
        inputs.pop()
    ours = helper.make_node(node.op_type, inputs, outputs, domain="linexport", **attributes)
    rewritten = helper.make_graph(
        [*before, ours, *after], graph.name, graph.input, graph.output, value_info=infos
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    return helper.make_model(rewritten, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("choose", LOWERINGS)
def test_node_case(choose: Choose, case: TestCase) -> None:
    model = rewrite(case.model)
    attach_functions(model, choose)
    onnx.checker.check_model(model, full_check=True)
    opened = runtimes.session(model)
    for inputs, outputs in case.data_sets:
        feeds = {i.name: _array(x) for i, x in zip(model.graph.input, inputs, strict=True)}
        for got, want in zip(opened.run(None, feeds), map(_array, outputs), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.atol)


def _array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
