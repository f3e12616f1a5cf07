"""Half precision goes where an op takes it, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from linexport.models import feature_maps
from linexport.plugins.ops.registry import register_schemas
from linexport.targets.trt.precision import ELEMENTS, half

TOKENS = ["batch", "seq"]


def model(log: int) -> onnx.ModelProto:
    """favor+ of two heads of 8; its exponents, where ``log`` is 1, are stabilised."""
    feature_maps.kinds()
    register_schemas()

    def value(name: str, width: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [*TOKENS, width])

    def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, op, domain="linexport", **attributes)

    names = {"kind": "favor+", "num_heads": 2, "log": log}
    nodes = [node("FeatureMap", ["x", "w"], ["features"], **names)]
    if log:
        heads = {"q_num_heads": 2, "k_num_heads": 2}
        nodes.append(node("StabilizedExp", ["features", "features"], ["y", "keys"], **heads))
    else:
        nodes.append(helper.make_node("Identity", ["features"], ["y"]))
    w = numpy_helper.from_array(np.ones((8, 16), np.float32), "w")
    between = [value("features", 32), *([value("keys", 32)] if log else [])]
    graph = helper.make_graph(
        nodes, "one", [value("x", 16)], [value("y", 32)], [w], value_info=between
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("precision", ELEMENTS)
def test_features_are_halves_and_parameters_are_not(precision: str) -> None:
    made = half(model(log=0), precision)
    (found,) = (n for n in made.graph.node if n.op_type == "FeatureMap")
    assert found.input[0] != "x" and found.input[1] == "w"
    kinds = {i.name: i.type.tensor_type.elem_type for i in made.graph.value_info}
    assert kinds[found.input[0]] == kinds[found.output[0]] == ELEMENTS[precision]
    onnx.checker.check_model(made, full_check=True)


@pytest.mark.parametrize("precision", ELEMENTS)
def test_exponents_keep_all_digits(precision: str) -> None:
    """StabilizedExp takes float32 only, and a logarithm of features has float32's range."""
    made = half(model(log=1), precision)
    by_type = {n.op_type: n for n in made.graph.node}
    assert by_type["StabilizedExp"].input[0] == by_type["FeatureMap"].output[0]
    kinds = {i.name: i.type.tensor_type.elem_type for i in made.graph.value_info}
    assert kinds[by_type["FeatureMap"].output[0]] == TensorProto.FLOAT
    onnx.checker.check_model(made, full_check=True)
