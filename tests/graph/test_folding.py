"""Folding of constants: by onnx's reference, by ONNX Runtime, or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases

from linexport.graph import folding
from linexport.graph.folding import fold
from linexport.passes import simplify
from linexport.passes.simplify import NOT_A_FUNCTION, SEQUENCES

OPSETS = (18, 19, 20, 21, 22, 23, 24, 25, 26)
"""Operator sets that graphs have when they are folded."""

CRASH = {"Einsum", "Loop", "Scan", "If", "SequenceMap"}
"""Operators that end the process where they contradict themselves, or that have bodies."""

KINDS = (np.float32, np.float16, np.float64, np.int64, np.int8, np.uint8, np.bool_)


def node(op: str, constants: list[Any], outputs: int = 1, **attrs: Any) -> gs.Node:
    inputs = [gs.Constant(f"i{k}", np.asarray(value)) for k, value in enumerate(constants)]
    return gs.Node(op, "n", attrs, inputs, [gs.Variable(f"o{k}") for k in range(outputs)])


@pytest.mark.parametrize("opset", OPSETS)
def test_a_dequantised_weight_is_folded_in_every_operator_set(opset: int) -> None:
    q = np.array([[-128, 5, 127], [1, -7, 0]], np.int8)
    scale, zero = np.float32([0.1, 0.25, 3.0]), np.array([3, 0, -5], np.int8)
    [made] = fold(node("DequantizeLinear", [q, scale, zero], axis=1), opset) or [None]
    assert made is not None
    expected = (q.astype(np.float64) - zero) * scale.astype(np.float64)
    assert made.values.dtype == np.float32
    np.testing.assert_allclose(made.values, expected, rtol=1e-6)


@pytest.mark.parametrize("opset", OPSETS)
def test_a_quantised_constant_saturates(opset: int) -> None:
    x = np.float32([-1e9, -0.26, 0.05, 0.15, 1e9])
    [made] = fold(node("QuantizeLinear", [x, np.float32(0.1), np.uint8(2)]), opset) or [None]
    assert made is not None  # halves go to the even number
    assert made.values.tolist() == [0, 0, 2, 4, 255] and made.values.dtype == np.uint8


def names(opset: int) -> list[str]:
    found = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    skipped = NOT_A_FUNCTION | SEQUENCES | CRASH
    return sorted(n for n in found - skipped if onnx.defs.has(n, opset, ""))


NAMES = {opset: names(opset) for opset in OPSETS}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_node_that_cannot_be_evaluated_stays(data: st.DataObject) -> None:
    """Whatever the operator, its operands and their types: constants of its outputs, or none."""
    opset = data.draw(st.sampled_from(OPSETS))
    op = data.draw(st.sampled_from(NAMES[opset]))
    values = data.draw(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.lists(st.integers(1, 3), max_size=3)),
            min_size=1,
            max_size=4,
        )
    )
    constants = [np.ones(shape, kind) for kind, shape in values]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = fold(node(op, constants), opset)
    assert made is None or [type(m) for m in made] == [gs.Constant]


def test_an_operator_that_nothing_evaluates_stays_in_the_graph() -> None:
    unknown = helper.make_node("DequantizeLinear", ["q", "scale"], ["w"], axis=7)
    total = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [unknown, total],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.ones((2, 3), np.int8), "q"),
            numpy_helper.from_array(np.ones(3, np.float32), "scale"),
        ],
    )
    surgeon = gs.import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    simplify.run(surgeon)
    assert [n.op for n in surgeon.nodes] == ["DequantizeLinear", "Add"]


@pytest.mark.parametrize(
    "kind", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "bfloat16"]
)
def test_a_type_that_numpy_lacks_is_written_as_it_was_read(kind: str) -> None:
    """Values are looked at by nothing: onnx-graphsurgeon writes some types of float8 as others."""
    weight = numpy_helper.from_array(
        np.float32([[0.5, -2.0]]).astype(getattr(ml_dtypes, kind)), "w"
    )
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["w"], ["d"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["c", "x"], ["a"]),
        helper.make_node("Add", ["d", "a"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["n", 2])],
        [value("y", TensorProto.FLOAT, None)],
        [weight],
    )
    surgeon = gs.import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    simplify.run(surgeon)
    written = gs.export_onnx(surgeon.cleanup().toposort(), do_type_check=False).graph
    assert [n.op_type for n in written.node] == ["Cast", "Add", "Add"]  # equal nodes are one
    [stored] = written.initializer
    assert (stored.data_type, stored.raw_data) == (weight.data_type, weight.raw_data)


OTHERWISE = {"Attention", "MaxUnpool", "Resize"}
"""Operators of which ONNX Runtime computes some cases otherwise than onnx, in files as well."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_operators_fold_to_what_the_tests_of_onnx_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "SMALL", 2**30)
    compared = 0
    for case in collect_testcases(None):
        [operator, *others], imports = case.model.graph.node, case.model.opset_import
        opset = next((o.version for o in imports if not o.domain), 0)
        skipped = operator.op_type in NOT_A_FUNCTION | SEQUENCES | OTHERWISE or operator.domain
        if others or skipped or opset not in OPSETS:
            continue
        given, expected = case.data_sets[0]
        if not all(isinstance(x, np.ndarray | np.generic) for x in (*given, *expected)):
            continue
        graph = gs.import_onnx(case.model)
        values = dict(zip((i.name for i in case.model.graph.input), given, strict=True))
        one = graph.nodes[0]
        one.inputs = [
            gs.Constant(t.name, np.asarray(values[t.name])) if t.name in values else t
            for t in one.inputs
        ]
        made = fold(one, opset)
        found = {t.name: m for t, m in zip(one.outputs, made or [], strict=False)}
        for output, wanted in zip(case.model.graph.output, expected, strict=True):
            if output.name in found and np.asarray(wanted).dtype.kind in "fiub":
                got = np.asarray(found[output.name].values)
                assert got.dtype == np.asarray(wanted).dtype, case.name
                np.testing.assert_allclose(got, wanted, 1e-3, 1e-5, err_msg=case.name)
                compared += 1
    assert compared > 400
