"""Running sums of tokens: their lowerings beside the definition, whole and in pieces."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from linexport.errors import OpError
from linexport.plugins.ops import cumulative_sum
from linexport.plugins.ops.cumulative_sum import OP
from linexport.plugins.ops.op import Lowering, Node
from linexport.plugins.ops.registry import attach_functions

LOWERINGS = {"portable": OP.portable, "from_zero": cumulative_sum.from_zero}


def session(
    lowering: str, shape: list[int | str], axis: int, exclusive: int, past: bool, kind: int
) -> onnxruntime.InferenceSession:
    state = [*shape[:axis], *shape[axis + 1 :]]
    value = helper.make_tensor_value_info
    node = helper.make_node(
        OP.name,
        ["x", "past"] if past else ["x"],
        ["y", "present"],
        "n",
        domain="linexport",
        axis=axis,
        exclusive=exclusive,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", kind, shape), *([value("past", TensorProto.FLOAT, state)] if past else [])],
        [value("y", kind, shape), value("present", TensorProto.FLOAT, state)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    attach_functions(model, lambda *_: LOWERINGS[lowering])
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lowerings_are_the_definition_in_pieces_of_any_length(data: st.DataObject) -> None:
    """Of any rank and axis, of no token too, with the sum so far or without."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    sizes[-1] *= data.draw(st.sampled_from([1, 64]))
    axis = data.draw(st.integers(1, len(sizes) - 1))
    pieces = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    exclusive, half = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    kind, dtype = (TensorProto.FLOAT16, np.float16) if half else (TensorProto.FLOAT, np.float32)
    shape: list[int | str] = ["B", *sizes[1:]]
    shape[axis] = "T"
    random = np.random.default_rng(sum(sizes))
    sizes[axis] = sum(pieces)
    x = random.standard_normal(sizes).astype(dtype)
    whole, state = cumulative_sum.cumulative_sum(x, None, axis, exclusive)
    for lowering in LOWERINGS:
        run = session(lowering, shape, axis, exclusive, True, kind).run
        past = np.zeros([*sizes[:axis], *sizes[axis + 1 :]], np.float32)
        found = []
        for part in np.split(x, np.cumsum(pieces)[:-1], axis):
            y, past = run(None, {"x": part, "past": past})
            found.append(y)
        got = np.concatenate(found, axis)
        np.testing.assert_allclose(got, whole, 1e-3 if half else 1e-5, 1e-2 if half else 1e-5)
        np.testing.assert_allclose(past, state, 1e-5, 1e-5)  # in float32 whatever the tokens are
        y, last = session(lowering, shape, axis, exclusive, False, kind).run(None, {"x": x})
        np.testing.assert_allclose(y, whole, 1e-3 if half else 1e-5, 1e-2 if half else 1e-5)
        np.testing.assert_allclose(last, state, 1e-5, 1e-5)


@pytest.mark.parametrize("past", ["", "past_state"])
@pytest.mark.parametrize("lowering", LOWERINGS.values(), ids=LOWERINGS)
def test_a_sum_in_float32_is_not_cast_or_copied(lowering: Lowering, past: str) -> None:
    """Each would read and write all of the tokens once more."""
    shapes = {"input": ("B", "T", 4), **({"past_state": ("B", 4)} if past else {})}
    node = Node(OP.name, {}, ("input", past), shapes, types={"input": TensorProto.FLOAT})
    body, (output, _) = lowering(node)
    made = {name: n.op_type for n in body.nodes for name in n.output}
    expected = {("past_state", OP.portable): "Add", ("past_state", cumulative_sum.from_zero): "If"}
    assert made[output] == expected.get((past, lowering), "CumSum")
    assert "Cast" not in made.values() and "CastLike" not in made.values()
    function = body.function("d", "f", ["input", past], {"output": output})
    assert "Identity" not in [n.op_type for n in function.node]


def test_a_past_that_is_no_number_is_seen() -> None:
    run = session("from_zero", ["B", "T", 4], 1, 0, True, TensorProto.FLOAT).run
    past = np.full((1, 4), np.nan, np.float32)
    y, state = run(None, {"x": np.ones((1, 3, 4), np.float32), "past": past})
    assert np.isnan(y).all() and np.isnan(state).all()


@pytest.mark.parametrize(
    ("axis", "shape", "past", "message"),
    [
        (0, (2, 3), None, "an axis behind the batch"),
        (2, (2, 3), None, "an axis behind the batch"),
        (1, (2, 3, 4), (2, 3), "size 1"),
        (1, (2, 3, 4), (2, 4, 1), "expected 2 dimensions"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(
    axis: int, shape: tuple[int, ...], past: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(OpError, match=message):
        cumulative_sum.check(axis, shape, past)
