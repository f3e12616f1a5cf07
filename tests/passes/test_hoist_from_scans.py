"""What a step computes from tokens alone leaves its Scan: the same values, less in the body."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import linexport
from linexport import passes
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

DYNAMIC = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
FORM = '<ir_version: 10, opset_import: ["" : 20, "linexport" : 1]>'


def model(step: str, state: str = "float[batch, 4] h", axis: int = 1) -> onnx.ModelProto:
    """A Scan over x (batch, seq, 4) of a step that computes ``next`` from h and t."""
    sizes = "batch, seq, 4" if axis == 1 else "seq, batch, 4"
    text = f"""{FORM} g (float[{sizes}] x, {state.replace(" h", " begin")})
        => ({state.replace(" h", " last")}, float[seq, batch, 4] y)
        <float[4, 4] w = {{{", ".join(str(0.1 * i - 0.7) for i in range(16))}}},
         float[4] c = {{1.0, -0.5, 0.25, 2.0}}, int64[1] end = {{-1}}, int64[1] one = {{1}},
         int64[2] halves = {{2, 2}}, int64[3] pairs = {{0, 2, 2}},
         int64 last_part = {{1}}, int64 first_part = {{0}}, float[1] two = {{2.0}},
         float[1] c_0 = {{1e-6}}, int64[2] wide = {{1, 4}}>
        {{ last, y = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}], body = step (
            {state}, float[batch, 4] t) => ({state.replace(" h", " next")}, float[batch, 4] out)
            {{ {step} out = Identity (next) }}> (begin, x) }}"""
    return with_shapes(parser.parse_model(text))


def with_shapes(found: onnx.ModelProto) -> onnx.ModelProto:
    """The same, with the shapes of what the body of its one Scan computes."""
    (body,) = [a.g for a in found.graph.node[0].attribute if a.name == "body"]
    # The body by itself, so that the shapes of what it computes are inferred and written.
    alone = onnx.helper.make_model(body, opset_imports=found.opset_import)
    alone.graph.initializer.extend(found.graph.initializer)
    body.value_info.extend(onnx.shape_inference.infer_shapes(alone).graph.value_info)
    return found


def values(of: onnx.ModelProto, length: int, axis: int = 1) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(of.SerializeToString(), options)
    random = np.random.default_rng(length)
    shape = (3, length, 4) if axis == 1 else (length, 3, 4)
    feeds = {"x": random.normal(size=shape), "begin": random.normal(size=(3, 4))}
    # The state of the Scan has been renamed to an input of its own, if it was exposed.
    return session.run(None, {k: v.astype(np.float32) for k, v in feeds.items()})


def inside(of: onnx.ModelProto) -> list[str]:
    """The operators of the one Scan's body."""
    (scan,) = [n for n in of.graph.node if n.op_type == "Scan"]
    (body,) = [a.g for a in scan.attribute if a.name == "body"]
    return sorted(n.op_type for n in body.node if n.op_type != "Identity")


def hoisted(of: onnx.ModelProto) -> onnx.ModelProto:
    return passes.rewrite(of, stop_after="hoist_from_scans").model


ENDS = "s = Tanh (h) next = Add (s, {0})"
"""A recurrence that is not linear, so that the Scan stays."""


@pytest.mark.parametrize(
    "step, value",
    [
        ("a = MatMul (t, w) b = Add (a, c) p = Sigmoid (b)", "p"),
        ("p = Gemm <transB = 1> (t, w, c)", "p"),
        ("p = Gemm (t, w)", "p"),
        ("a = Pow (t, two) b = ReduceMean (a, end) r = Sqrt (b) p = Div (t, r)", "p"),
        ("p = Softmax <axis = 1> (t)", "p"),
        ("a, b = Split <axis = 1> (t, halves) p = Concat <axis = 1> (b, a)", "p"),
        ("a = Reshape (t, pairs) b = ReduceSum (a, one) d = Squeeze (b, one)"
         " e = Exp (d) p = Concat <axis = 1> (e, e)", "p"),
        ("q = SplitToSequence <axis = 1> (t, halves) a = SequenceAt (q, last_part)"
         " b = SequenceAt (q, first_part) p = Concat <axis = 1> (a, b)", "p"),
        ("a = Transpose <perm = [1, 0]> (t) b = Exp (a) p = Transpose <perm = [1, 0]> (b)", "p"),
        ("n = Neg (c) p = Mul (t, n)", "p"),
        ("n = CastLike (two, t) p = Mul (t, n)", "p"),
        ("a = ReduceL2 (t, one) b = Max (a, c_0) e = Expand (b, wide) p = Div (t, e)",
         "p"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1])
def test_values_of_tokens_are_computed_before_the_scan(step: str, value: str, axis: int) -> None:
    original = model(f"{step} {ENDS.format(value)}", axis=axis)
    rewritten = hoisted(original)
    onnx.checker.check_model(rewritten, full_check=True)
    assert set(inside(rewritten)) <= {"Tanh", "Add", "Concat", "Transpose"}
    for length in (1, 5):
        expected, got = values(original, length, axis), values(rewritten, length, axis)
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "step, kept",
    [
        # An outer product of all tokens would be as large as all states.
        ("a = Unsqueeze (t, end) b = Unsqueeze (t, one) o = Mul (a, b) r = ReduceSum (o, end)"
         " p = Squeeze (r, end)", ["Mul", "ReduceSum"]),
        # What reads the state stays, and so does what reads that.
        ("a = Add (h, t) p = Exp (a)", ["Add", "Exp"]),
        # A layout alone is no reason to leave.
        ("a = Transpose <perm = [1, 0]> (t) p = Transpose <perm = [1, 0]> (a)", ["Transpose"]),
    ],
)  # fmt: skip
def test_what_stays_in_the_body(step: str, kept: list[str]) -> None:
    original = model(f"{step} {ENDS.format('p')}")
    rewritten = hoisted(original)
    assert set(kept) <= set(inside(rewritten))
    np.testing.assert_array_equal(values(original, 5)[1], values(rewritten, 5)[1])


@pytest.mark.parametrize("step", [
    # Numbers of the file in the body, before the loop and after it.
    "a = Mul (t, k) b = Exp (a) s = Tanh (h) next = Add (s, b) out = Identity (next)",
    "s = Mul (h, k) next = Add (s, t) out = Max (next, k)",
    # Numbers that the rewrite makes: 1 and 0 of a mask, in the order of the choice.
    "a = Add (h, t) c = Greater (t, k) next = Where (c, {}, {}) out = Identity (next)",
])  # fmt: skip
def test_bodies_may_have_the_same_names_for_different_numbers(step: str) -> None:
    loops = [
        f"last_{n}, {n} = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = step_{n} ("
        "float[batch, 4] h, float[batch, 4] t) => (float[batch, 4] next, float[batch, 4] out)"
        f" <float k = {{{k}}}> {{ {step.format(*sides)} }}> (begin, x)"
        for n, k, sides in (("y", 0.5, ("a", "nil")), ("z", -0.25, ("nil", "a")))
    ]
    text = f"""{FORM} g (float[batch, seq, 4] x, float[batch, 4] begin)
        => (float[seq, batch, 4] y, float[seq, batch, 4] z) <float nil = {{0.0}}>
        {{ {" ".join(loops)} }}"""
    original = parser.parse_model(text)
    rewritten = passes.rewrite(original, stop_after="sink_from_scans").model
    for a, b in zip(values(original, 7), values(rewritten, 7), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class GatedUnit(nn.Module):
    """An RG-LRU that projects each token in its loop, as a layer of PyTorch's cells does."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.rate = nn.Linear(16, 32), nn.Parameter(torch.linspace(0.5, 3, 16))

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            r, i = self.gates(x[:, t]).sigmoid().chunk(2, -1)
            a = self.rate.sigmoid() / 8**r
            h = a * h + (1 - a**2) ** 0.5 * (i * x[:, t])
            out.append(h)
        return torch.stack(out, 1)


class MatrixMemory(nn.Module):
    """Gated linear attention by tokens, its projections in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.gate = nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, x):
        state, out = x.new_zeros(x.shape[0], 2, 8, 8), []
        for t in range(x.shape[1]):
            q, k, v = self.project(x[:, t]).unflatten(-1, (3, 2, 8)).unbind(1)
            decay = torch.sigmoid(self.gate(x[:, t]))[..., None, None]
            state = decay * state + k.unsqueeze(-1) * v.unsqueeze(-2)
            out.append((q.unsqueeze(-2) @ state).squeeze(-2).flatten(1))
        return torch.stack(out, 1)


class NormalisedKeys(nn.Module):
    """Kimi delta attention by tokens, which normalises query and key in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.gate = nn.Linear(16, 48), nn.Linear(16, 18)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        decay, beta = self.gate(x).sigmoid().split([16, 2], -1)
        state, out = x.new_zeros(x.shape[0], 16, 16), []
        for t in range(x.shape[1]):
            query, key = (F.normalize(z[:, t], dim=-1) for z in (q, k))
            state = state * decay[:, t, :, None]
            error = v[:, t] - (state * key[:, :, None]).sum(1)
            state = state + (beta[:, t, :1] * key)[:, :, None] * error[:, None]
            out.append((state * query[:, :, None]).sum(1))
        return torch.stack(out, 1)


@pytest.mark.parametrize("layer", [GatedUnit, MatrixMemory, NormalisedKeys])
def test_a_loop_that_projects_its_tokens_is_fused_and_streams(layer, tmp_path) -> None:
    torch.manual_seed(0)
    module = layer().eval()
    loaded = load_module((module, (torch.randn(2, 16, 16),), DYNAMIC), "user:layer")
    manifest = linexport.convert(loaded, tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok"
    attention = ("LinearAttention", "GeneralizedDeltaRule")
    assert sum(manifest.fused.get(op, 0) for op in attention) == 1
    assert manifest.streaming is not None and manifest.streaming.passed
    check_independently(tmp_path / "a", module, 16, lengths=(1, 7, 130))


def test_a_lstm_projects_all_tokens_at_once() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(8, 8)

        def forward(self, x):
            h = c = torch.zeros_like(x[:, 0])
            out = []
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                out.append(h)
            return torch.stack(out, 1)

    loaded = load_module((Cell().eval(), (torch.randn(2, 16, 8),), DYNAMIC), "user:layer")
    rewritten = passes.rewrite(trace(loaded).model).model
    products = [op for op in inside(rewritten) if op in ("MatMul", "Gemm")]
    assert len(products) == 1, "the product with the state, and no other"
