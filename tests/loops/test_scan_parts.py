"""States that read no others get a Scan of their own: the same values, and one part is linear."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from linexport import passes
from tests.passes.test_hoist_from_scans import with_shapes

pytestmark = pytest.mark.usefixtures("one_thread")


def model(step: str) -> onnx.ModelProto:
    """A Scan over x (batch, seq, 4) with the states m (batch, 4) and C (batch, 4, 4)."""
    text = f"""<ir_version: 10, opset_import: ["" : 20, "linexport" : 1]>
        g (float[batch, seq, 4] x, float[batch, 4] m_0, float[batch, 4, 4] C_0)
        => (float[batch, 4] m_T, float[batch, 4, 4] C_T, float[seq, batch, 4] y)
        <int64[1] end = {{-1}}, int64[1] before = {{1}}>
        {{ m_T, C_T, y = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = step
            (float[batch, 4] m, float[batch, 4, 4] C, float[batch, 4] t)
            => (float[batch, 4] m_next, float[batch, 4, 4] C_next, float[batch, 4] out)
            {{ {step} }}> (m_0, C_0, x) }}"""
    return with_shapes(parser.parse_model(text))


def values(of: onnx.ModelProto, length: int) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(of.SerializeToString())
    random = np.random.default_rng(length)
    shapes = {"x": (3, length, 4), "m_0": (3, 4), "C_0": (3, 4, 4)}
    feeds = {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    return session.run(None, feeds)


def bodies(of: onnx.ModelProto) -> list[list[str]]:
    """The operators of each Scan's body."""
    scans = [n for n in of.graph.node if n.op_type == "Scan"]
    graphs = [next(a.g for a in n.attribute if a.name == "body") for n in scans]
    return [sorted(n.op_type for n in g.node if n.op_type != "Identity") for g in graphs]


OUTER = "k = Unsqueeze (t, end) v = Unsqueeze (t, before) kv = Mul (k, v) "
READ = " q = Unsqueeze (t, end) r = MatMul (C_next, q) out = Squeeze (r, end)"
STABLE = (
    "m_next = Max (m, t) d = Sub (m, m_next) f = Exp (d) w = Unsqueeze (f, end) "
    + OUTER
    + "i = Mul (w, kv) kept = Mul (w, C) C_next = Add (kept, i)"
)
CONTROLLED = (
    "a = Tanh (m) m_next = Add (a, t) g = Sigmoid (m) w = Unsqueeze (g, end) "
    + OUTER
    + "kept = Mul (w, C) C_next = Add (kept, kv)"
)


@pytest.mark.parametrize(
    ("step", "second"),
    [
        # The outer product of what crosses over is made again, so that no matrix does.
        (STABLE + READ, ["Add", "MatMul", "Mul", "Mul", "Mul", "Squeeze"]),
        (CONTROLLED + READ, ["Add", "MatMul", "Mul", "Mul", "Squeeze"]),
        # A softmax of the first state reads the second one.
        (
            "h = Mul (m, t) m_next = Add (h, t) p = Softmax <axis = 1> (m_next) " + OUTER + "C_next"
            " = Add (C, kv) q = Unsqueeze (p, end) r = MatMul (C_next, q) out = Squeeze (r, end)",
            ["Add", "MatMul", "Mul", "Squeeze"],
        ),
    ],
)
def test_a_state_that_reads_no_other_gets_a_loop_of_its_own(step: str, second: list[str]) -> None:
    original = model(step)
    rewritten = passes.rewrite(original, stop_after="sink_from_scans").model
    onnx.checker.check_model(rewritten, full_check=True)
    first, rest = bodies(rewritten)
    assert [op for op in rest if op != "Unsqueeze"] == second
    assert "MatMul" not in first
    for length in (1, 6):
        for a, b in zip(values(original, length), values(rewritten, length), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "step",
    [
        # Each reads the other.
        "s = ReduceSum <keepdims = 0> (C, end) a = Tanh (m) b = Add (a, s) m_next = Add (b, t) "
        "w = Unsqueeze (m, end) C_next = Mul (w, C)" + READ,
        # Neither is linear beside the other.
        "a = Tanh (m) m_next = Add (a, t) b = Tanh (C) w = Unsqueeze (a, end) C_next = Add (b, w)"
        + READ,
        # Both are linear as they stand.
        "m_next = Add (m, t) " + OUTER + "C_next = Add (C, kv)" + READ,
        # A matrix would cross over.
        "a = Tanh (C) " + OUTER + "C_next = Add (a, kv) e = Exp (C_next) b = Unsqueeze (m, end) "
        "r = MatMul (e, b) n = Squeeze (r, end) m_next = Add (n, t) out = Identity (m_next)",
    ],
)
def test_what_stays_one_loop(step: str) -> None:
    original = model(step)
    rewritten = passes.rewrite(original, stop_after="sink_from_scans").model
    assert len(bodies(rewritten)) == 1
    for a, b in zip(values(original, 5), values(rewritten, 5), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
