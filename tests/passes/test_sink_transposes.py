"""Transposes moved behind what reads them: the same values, fewer of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from linexport import passes

FORM = '<ir_version: 10, opset_import: ["" : 20, "linexport" : 1]>'
X = "float[2, t, 6] x, float[2, t, 3] y"
TURN = "<perm = [0, 2, 1]>"


def model(body: str, outputs: str = "float[2, t, c] z") -> onnx.ModelProto:
    weights = "int64[2] halves = {3, 3}, float one = {1.0}"
    matrix = ", ".join(str(0.1 * i) for i in range(12))
    text = f"{FORM} g ({X}) => ({outputs}) <{weights}, float[4, 3] w = {{{matrix}}}> {{ {body} }}"
    return parser.parse_model(text)


def values(of: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(of.SerializeToString())
    rng = np.random.default_rng(0)
    x = {"x": (2, 5, 6), "y": (2, 5, 3)}
    feeds = {n: rng.normal(size=s).astype(np.float32) for n, s in x.items()}
    found = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    return [np.asarray(value) for value in found]


def operators(of: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in of.graph.node)


GATED = f"""
    a = Transpose {TURN} (x)
    b, c = Split <axis = 1> (a, halves)
    s = Sigmoid (c)
    silu = Mul (c, s)
    d = Transpose {TURN} (y)
    e = Add (silu, one)
    f = Mul (d, e)
    """
"""Half of x gates y, channels before tokens; the other half is b."""


@pytest.mark.parametrize(
    "body, outputs, left",
    [
        (GATED + f"h = Transpose {TURN} (f) z = Exp (h)", "float[2, t, c] z", 0),
        (GATED + f"h = Transpose {TURN} (f) z = Exp (h)", "float[2, t, c] z, float[2, c, t] b", 1),
        (
            GATED + f"h = Transpose {TURN} (f) z = Exp (h) g = Exp (e)",
            "float[2, t, c] z, float[2, c, t] g",
            1,
        ),
        (
            f"a = Transpose {TURN} (y) b = MatMul (w, a) c = Transpose {TURN} (b) z = Exp (c)",
            "float[2, t, c] z",
            0,
        ),
        (f"a = Transpose {TURN} (y) b = MatMul (w, a) z = Exp (b)", "float[2, c, t] z", 1),
        (f"a = Transpose {TURN} (y) z = Softmax <axis = 1> (a)", "float[2, c, t] z", 1),
    ],
)
def test_transposes_that_are_undone_go(body: str, outputs: str, left: int) -> None:
    before = model(body, outputs)
    after = passes.run(before, ("absorb", "tidy"))
    assert operators(after).count("Transpose") == left
    for one, other in zip(values(after), values(before), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        f"a = Transpose {TURN} (y) b = Exp (a) c = Softmax <axis = 1> (a) z = Add (b, c)",
        f"a = Transpose {TURN} (y) b = Exp (a) c = Transpose {TURN} (b) d = Transpose {TURN} (c) "
        f"e = Add (a, d) z = Softmax <axis = 1> (e)",
        f"a = Transpose {TURN} (y) no = Cast <to = 9> (one) z = If (no) "
        f"<then_branch = p () => (float[c, d, e] u) {{ v = Exp (a) u = Transpose {TURN} (v) }}, "
        f"else_branch = q () => (float[c, d, e] i) {{ i = Transpose {TURN} (a) }}>",
        "a = Transpose <perm = [1, 2, 0]> (y) b = Exp (a) z = Transpose <perm = [1, 2, 0]> (b)",
    ],
)
def test_others_compute_the_same(body: str) -> None:
    """A layout that others need, a region that reads itself, branches, another permutation."""
    before = model(body, "float[c, d, e] z")
    after = passes.run(before, ("absorb", "tidy"))
    assert operators(after).count("Transpose") <= operators(before).count("Transpose")
    for one, other in zip(values(after), values(before), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
