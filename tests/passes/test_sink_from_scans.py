"""What outputs alone need leaves a Scan at its end: the same values, less in the body."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from linexport import passes
from linexport.loops.step_nodes import give_every_step
from tests.passes.test_hoist_from_scans import inside, values
from tests.passes.test_hoist_from_scans import model as scan_of

pytestmark = pytest.mark.usefixtures("one_thread")

LOOP = "s = Tanh (h) next = Add (s, t)"
"""A recurrence that is not linear, so that the Scan stays."""


def model(step: str, axis: int, output: str = "out = Identity (next)") -> onnx.ModelProto:
    """A Scan whose output of all steps is computed in the step."""
    found = scan_of(f"{LOOP} {step}", axis=axis)
    (body,) = [a.g for a in found.graph.node[0].attribute if a.name == "body"]
    last = next(n for n in body.node if n.output[0] == "out")
    last.input[0] = output
    return found


def sunk(of: onnx.ModelProto) -> onnx.ModelProto:
    return passes.rewrite(of, stop_after="sink_from_scans").model


@pytest.mark.parametrize(
    "step",
    [
        "p = MatMul (next, w)",
        "a = Gemm (next, w, c) b = Sigmoid (a) p = Mul (b, t)",
        "a = Exp (next) p = Add (a, t)",
        "p = Mul (next, next)",
        "p = Softmax <axis = 1> (next)",
        "a = Add (next, t) b = Abs (a) d = Add (b, c) p = Div (next, d)",
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_values_of_outputs_are_computed_after_the_scan(step: str, axis: int) -> None:
    original = model(step, axis, "p")
    rewritten = sunk(original)
    onnx.checker.check_model(rewritten, full_check=True)
    assert set(inside(rewritten)) <= {"Tanh", "Add"}
    for length in (1, 5):
        expected, got = values(original, length, axis), values(rewritten, length, axis)
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "step, kept",
    [
        # Sums and products of states and tokens are read where they are.
        ("p = Mul (next, t)", "Mul"),
        # What is as large as an outer product stays: there is one of them at a time.
        (
            "a = Unsqueeze (next, end) b = Unsqueeze (t, one) o = Mul (a, b) e = Exp (o)"
            " r = ReduceSum (e, end) p = Squeeze (r, end)",
            "Exp",
        ),
    ],
)
def test_what_stays(step: str, kept: str) -> None:
    original = model(step, 1, "p")
    rewritten = sunk(original)
    assert kept in inside(rewritten)
    for a, b in zip(values(original, 5), values(rewritten, 5), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_what_the_next_state_needs_stays() -> None:
    """The function of the state is both an output and in the next state."""
    original = scan_of("a = MatMul (h, w) s = Tanh (a) next = Add (s, t)")
    rewritten = sunk(original)
    assert inside(rewritten) == ["Add", "MatMul", "Tanh"]


def test_a_value_that_leaves_twice_has_two_names() -> None:
    found = model("p = MatMul (next, w)", 0, "p")
    graph = gs.import_onnx(found)
    (scan,) = (n for n in graph.nodes if n.op == "Scan")
    tensor = scan.attrs["body"].outputs[0]
    given = [give_every_step(scan, tensor, list(tensor.shape), "all") for _ in range(2)]
    assert len({t.name for t in given}) == 2
    names = [t.name for t in scan.attrs["body"].outputs]
    assert len(set(names)) == len(names)
