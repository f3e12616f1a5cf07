"""Which nodes compute with sizes of tensors alone, and so count as no part of an op."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from linexport.targets.runtime.shape_arithmetic import shape_arithmetic


def _constant(name: str, value: object) -> onnx.NodeProto:
    tensor = numpy_helper.from_array(np.asarray(value))
    return helper.make_node("Constant", [], [name], value=tensor)


def _node(op: str, *inputs: str, to: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [to], name=to, **attributes)


GIVEN = [
    _constant("one", np.int64(1)),
    _constant("axes", np.array([0])),
    _constant("weights", np.ones(3, np.float32)),
    _constant("table", np.ones((3, 3), np.int64)),
    _node("Shape", "x", to="sizes"),
]


@pytest.mark.parametrize(
    ("node", "counts"),
    [
        (_node("Add", "sizes", "one"), True),
        (_node("Squeeze", "sizes", "axes"), True),
        (_node("Concat", "sizes", "axes", axis=0), True),
        (_node("LessOrEqual", "sizes", "one"), True),
        (_node("Cast", "sizes", to_type=TensorProto.INT32), True),
        (_node("Shape", "weights"), True),
        # values of the input, if only one of several
        (_node("Add", "sizes", "x"), False),
        (_node("Gather", "sizes", "x"), False),
        (_node("Max", "x", "x"), False),
        # as many values as the sizes say, or floating point
        (_node("Range", "one", "one", "one"), False),
        (_node("Expand", "one", "sizes"), False),
        (_node("CumSum", "sizes", "one"), False),
        (_node("Cast", "sizes", to_type=TensorProto.FLOAT), False),
        (_node("Gather", "weights", "one"), False),
        (_node("Gather", "table", "sizes"), False),
        # of another domain
        (helper.make_node("Add", ["sizes", "one"], ["y"], name="y", domain="some"), False),
    ],
)
def test_only_integers_of_sizes_and_small_constants_count(
    node: onnx.NodeProto, counts: bool
) -> None:
    for attribute in node.attribute:
        attribute.name = attribute.name.replace("to_type", "to")
    found = [n.name for n in shape_arithmetic([*GIVEN, node])]
    assert found == ["sizes", *(["y"] if counts else [])]


def test_bodies_know_the_sizes_around_them_and_their_own_inputs_are_values() -> None:
    body = helper.make_graph(
        [
            _node("Add", "sizes", "sizes", to="around"),
            _node("Add", "state", "sizes", to="value"),
            _node("Shape", "state", to="inner"),
        ],
        "body",
        [helper.make_tensor_value_info("state", TensorProto.INT64, None)],
        [],
    )
    scan = helper.make_node("Scan", ["x"], ["out"], name="scan", num_scan_inputs=1, body=body)
    found = [n.name for n in shape_arithmetic([*GIVEN, scan, _node("Add", "out", "one")])]
    assert found == ["sizes", "around", "inner"]


def test_initializers_count_as_constants_do() -> None:
    small = numpy_helper.from_array(np.array([2, 3]), "small")
    large = numpy_helper.from_array(np.ones((2, 3), np.int64), "large")
    nodes = [_node("Add", "small", "small", to="a"), _node("Add", "large", "large", to="b")]
    assert [n.name for n in shape_arithmetic(nodes, [small, large])] == ["a"]
