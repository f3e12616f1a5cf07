"""The table of operators: a row for each of ONNX's, whose facts hold where the operator is run."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import linexport
from linexport.graph.operators import (
    BOOLEAN,
    CHOICES,
    COPIES,
    ELEMENTWISE,
    NEVER_NEGATIVE,
    OPERATORS,
    RANDOM,
    RESHAPES,
    SIZES_ONLY,
    SUMS,
    VIEWS,
    groups,
    is_affine,
    is_linear,
    typed_like_output,
)

RNG = np.random.default_rng(0)
SCHEMAS = {s.name: s for s in onnx.defs.get_all_schemas() if not s.domain}

Example = tuple[list[Any], dict[str, Any]]
"""Inputs and attributes."""

ROOMS = ("graph", "inspection", "loops", "match", "parity", "passes", "sources", "targets")
ROOMS += ("timing", "token_flow", "trace")


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


IMAGE = numbers(1, 4, 6, 6)
GRID = np.tanh(numbers(1, 5, 5, 2))
POOL: Example = ([IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]})
LENGTHS = whole(3, 2)

EXAMPLES: dict[str, list[Example]] = {
    "AveragePool": [POOL],
    "BitShift": [
        (
            [np.arange(12, dtype=np.uint8).reshape(3, 4), np.ones((3, 4), np.uint8)],
            {"direction": "LEFT"},
        )
    ],
    "Cast": [([numbers(3, 4)], {"to": onnx.TensorProto.DOUBLE})],
    "CastLike": [([numbers(3, 4), np.zeros((), np.float64)], {})],
    "Clip": [([numbers(3, 4), np.float32(-0.5), np.float32(0.7)], {})],
    "Col2Im": [([numbers(1, 8, 5), whole(6, 1), whole(2, 1)], {})],
    "Compress": [([numbers(3, 4), np.array([True, False, True])], {"axis": 0})],
    "Concat": [([numbers(3, 4), numbers(2, 4), numbers(1, 4)], {"axis": 0})],
    "Conv": [([IMAGE, numbers(2, 4, 3, 3), numbers(2)], {"pads": [1, 1, 1, 1]})],
    "ConvTranspose": [([IMAGE, numbers(4, 2, 3, 3), numbers(2)], {})],
    "CumSum": [
        ([numbers(3, 4), np.int64(0)], {}),
        ([numbers(3, 4), np.int64(1)], {"reverse": 1, "exclusive": 1}),
    ],
    "DFT": [([numbers(2, 5, 1)], {})],
    "DepthToSpace": [([IMAGE], {"blocksize": 2, "mode": mode}) for mode in ("DCR", "CRD")],
    "Einsum": [([numbers(3, 4), numbers(4, 2), numbers(2)], {"equation": "ij,jk,k->ik"})],
    "Expand": [([numbers(3, 1), whole(2, 3, 4)], {})],
    "EyeLike": [([numbers(3, 4)], {})],
    "Flatten": [([numbers(2, 3, 4)], {"axis": axis}) for axis in (0, 2)],
    "Gather": [([numbers(3, 4), whole(2, 0, 2)], {"axis": 1})],
    "GatherElements": [([numbers(3, 4), np.array([[2, 0, 1, 1]])], {"axis": 0})],
    "GatherND": [([numbers(3, 4), np.array([[2, 1], [0, 3]])], {})],
    "Gemm": [([numbers(4, 3), numbers(4, 2), numbers(2)], {"transA": 1, "alpha": 0.5})],
    "GlobalAveragePool": [([IMAGE], {})],
    "GlobalLpPool": [],
    "GlobalMaxPool": [([IMAGE], {})],
    "GridSample": [([IMAGE, GRID], {"mode": "linear", "padding_mode": "zeros"})],
    "Hardmax": [([numbers(3, 4)], {})],
    "LpPool": [POOL],
    "MatMul": [([numbers(2, 3, 4), numbers(4, 2)], {})],
    "MaxPool": [POOL],
    "MaxRoiPool": [],
    "Mod": [([numbers(3, 4), numbers(3, 4)], {"fmod": 1})],
    "PRelu": [([numbers(3, 4), numbers(3, 4)], {})],
    "Pad": [
        ([numbers(3, 4), whole(1, 0, 0, 2), np.float32(0.5)], {}),
        ([numbers(3, 4), whole(1, 0, 0, 2)], {"mode": "reflect"}),
    ],
    "Reshape": [([numbers(3, 4), whole(2, -1)], {})],
    "ReverseSequence": [([numbers(3, 2, 4), LENGTHS], {"time_axis": 0, "batch_axis": 1})],
    "STFT": [([numbers(1, 16, 1), np.int64(4), np.ones(8, np.float32)], {})],
    "SequenceAt": [],
    "SequenceLength": [],
    "Slice": [([numbers(3, 4), whole(3), whole(0), whole(1), whole(-1)], {})],
    "Softmax": [([numbers(3, 4)], {"axis": 1})],
    "SpaceToDepth": [([IMAGE], {"blocksize": 2})],
    "Split": [([numbers(3, 4), whole(1, 3)], {"axis": 1})],
    "SplitToSequence": [],
    "Squeeze": [([numbers(3, 1, 4), whole(1)], {})],
    "TensorScatter": [([numbers(1, 2, 5, 3), numbers(1, 2, 2, 3), whole(1)], {})],
    "Tile": [([numbers(3, 4), whole(2, 1)], {})],
    "Transpose": [([numbers(2, 3, 4)], {"perm": [2, 0, 1]})],
    "Trilu": [([numbers(3, 4)], {"upper": upper}) for upper in (0, 1)],
    "Unsqueeze": [([numbers(3, 4), whole(0)], {})],
    "Where": [([numbers(3, 4) > 0, numbers(3, 4), numbers(3, 4)], {})],
}
"""Empty where the reference has no arrays to compare: sequences, and operators that it lacks."""

EXAMPLES |= {
    name: [([numbers(3, 4), whole(1)], {"keepdims": keeps}) for keeps in (0, 1)]
    for name in OPERATORS
    if name.startswith("Reduce")
}


def examples(op: str) -> list[Example]:
    """Return calls of an operator; of an elementwise one, with inputs as its schema has them."""
    if op in EXAMPLES:
        return EXAMPLES[op]
    schema = SCHEMAS[op]
    kinds = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    inputs = []
    several = schema.inputs[0].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    for one in [*schema.inputs, *schema.inputs[:1] * (2 if several else 0)]:
        allowed = kinds.get(one.type_str, [one.type_str])
        if "tensor(float)" in allowed:
            inputs.append(numbers(3, 4))
        elif "tensor(bool)" in allowed:
            inputs.append(numbers(3, 4) > 0)
        else:
            inputs.append(RNG.integers(0, 9, (3, 4)).astype(np.uint8))
    return [(inputs, {})]


def run(op: str, inputs: Sequence[Any], attributes: dict[str, Any]) -> list[np.ndarray]:
    names = [f"x{i}" for i in range(len(inputs))]
    count = 2 if op == "Split" else 1
    made = [f"y{i}" for i in range(count)]
    node = helper.make_node(op, names, made, **attributes)
    given = [_information(n, np.asarray(x)) for n, x in zip(names, inputs, strict=True)]
    results = [onnx.ValueInfoProto(name=name) for name in made]
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(helper.make_graph([node], op, given, results))
    )
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    return [np.asarray(x) for x in found]


def _information(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, kind, value.shape)


def calls(names: Sequence[str] | frozenset[str]) -> list[Any]:
    return [
        pytest.param(op, *example, id=f"{op}-{i}")
        for op in sorted(names)
        for i, example in enumerate(examples(op))
    ]


def test_each_standard_operator_has_a_row() -> None:
    assert set(OPERATORS) == set(SCHEMAS)


def test_rules_name_no_other_operators_of_opset_20_to_27() -> None:
    """Those that a later version of ONNX dropped would have no row."""
    known = {
        s.name
        for s in onnx.defs.get_all_schemas_with_history()
        if not s.domain and s.since_version <= 27
    }
    root = Path(linexport.__path__[0])
    named = {
        node.value
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known
    }
    assert len(named) > 100 and named <= set(OPERATORS)


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(ELEMENTWISE))
def test_an_entry_depends_on_those_at_its_place(
    op: str, inputs: list[Any], attributes: dict[str, Any]
) -> None:
    (whole_result,) = run(op, inputs, attributes)
    order = RNG.permutation(12)
    moved = [x if np.ndim(x) < 2 else x.ravel()[order].reshape(x.shape) for x in inputs]
    (moved_result,) = run(op, moved, attributes)
    assert whole_result.shape == (3, 4)
    np.testing.assert_array_equal(moved_result.ravel(), whole_result.ravel()[order])


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"), calls([op for op, row in OPERATORS.items() if row.linear])
)
def test_it_is_linear_in_each_group_and_in_no_larger_one(
    op: str, inputs: list[Any], attributes: dict[str, Any]
) -> None:
    count = len(inputs)
    found = groups(op, count)
    assert found
    for size in range(1, count + 1):
        for places in itertools.combinations(range(count), size):
            if all(np.asarray(inputs[p]).dtype == np.float32 for p in places):
                taken = [p in places for p in range(count)]
                expected = _is_linear(op, inputs, attributes, places)
                assert not is_linear(op, taken) or expected, places
                # Beyond: a group that is not listed must not be linear, or a fact is missing.
                assert is_linear(op, taken) or not expected or op in MISSED, places
                assert not is_linear(op, taken) or is_affine(op, taken)


MISSED = {"STFT", "GridSample", "Gemm", "Conv", "ConvTranspose", "Pad"}
"""Operators that are linear in windows too, or in a bias that is 0 or not read."""


def _is_linear(
    op: str, inputs: list[Any], attributes: dict[str, Any], places: tuple[int, ...]
) -> bool:
    first = [RNG.standard_normal(np.shape(inputs[p])).astype(np.float32) for p in places]
    second = [RNG.standard_normal(np.shape(inputs[p])).astype(np.float32) for p in places]

    def result(values: list[np.ndarray]) -> np.ndarray:
        given = list(inputs)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return np.concatenate([x.astype(np.float64).ravel() for x in run(op, given, attributes)])

    mixed = result([2 * a - 3 * b for a, b in zip(first, second, strict=True)])
    expected = 2 * result(first) - 3 * result(second)
    return bool(np.allclose(mixed, expected, atol=1e-4 * max(1, abs(expected).max())))


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(CHOICES))
def test_every_entry_is_one_of_the_first_input(
    op: str, inputs: list[Any], attributes: dict[str, Any]
) -> None:
    for found in run(op, inputs, attributes):
        assert found.size and np.isin(found, inputs[0]).all()


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(VIEWS | COPIES))
def test_entries_are_in_their_order(op: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    (found,) = run(op, inputs, attributes)
    np.testing.assert_array_equal(found.ravel(), inputs[0].ravel())
    assert op not in COPIES or found.shape == inputs[0].shape


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(RESHAPES))
def test_every_entry_is_there_once(op: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    (found,) = run(op, inputs, attributes)
    np.testing.assert_array_equal(np.sort(found.ravel()), np.sort(inputs[0].ravel()))


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(NEVER_NEGATIVE))
def test_no_number_is_below_zero(op: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    for factor in (1.0, 100.0):
        given = [np.asarray(x * factor, x.dtype) if x.dtype.kind == "f" else x for x in inputs]
        for found in run(op, given, attributes):
            assert not (found < 0).any()


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(BOOLEAN))
def test_comparisons_and_logic_give_truth(
    op: str, inputs: list[Any], attributes: dict[str, Any]
) -> None:
    assert run(op, inputs, attributes)[0].dtype == bool


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(SIZES_ONLY))
def test_sizes_do_not_depend_on_entries(
    op: str, inputs: list[Any], attributes: dict[str, Any]
) -> None:
    others = [inputs[0] + 1, *inputs[1:]]
    np.testing.assert_array_equal(run(op, inputs, attributes)[0], run(op, others, attributes)[0])


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    calls([op for op, row in OPERATORS.items() if row.neutral is not None]),
)
def test_a_neutral_entry_does_not_count(
    op: str, inputs: list[Any], attributes: dict[str, Any]
) -> None:
    neutral = OPERATORS[op].neutral
    x = np.concatenate([inputs[0], np.full((3, 1), neutral, np.float32)], 1)
    found, expected = (run(op, [v, *inputs[1:]], attributes)[0] for v in (x, inputs[0]))
    if op == "Softmax":
        assert (found[:, -1] == 0).all()
        found = found[:, :-1]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(("op", "inputs", "attributes"), calls(SUMS))
def test_sums_are_of_ones(op: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    """A sum or mean of equal entries is a multiple of them."""
    (found,) = run(op, [np.ones((3, 4), np.float32), *inputs[1:]], attributes)
    assert set(found.ravel()) <= {0.0, 1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize("op", sorted(ELEMENTWISE | CHOICES))
def test_the_type_of_the_output_is_that_of_the_inputs_which_say_so(op: str) -> None:
    for inputs, attributes in examples(op):
        found = run(op, inputs, attributes)[0]
        for place in typed_like_output(op):
            if place < len(inputs):
                assert np.asarray(inputs[place]).dtype == found.dtype


def test_what_is_drawn_is_marked() -> None:
    assert {op for op in SCHEMAS if "seed" in SCHEMAS[op].attributes} - {"Dropout"} == RANDOM
