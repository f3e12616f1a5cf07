"""Reasons are linexport's own words, and name what mixes tokens for what it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from linexport import passes
from linexport.graph.states import State
from linexport.match.proof import prove
from linexport.match.search.obstacles import first_loop, first_obstacle
from linexport.sources.factory import load_module
from linexport.token_flow import classify
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def graph_of(
    nodes: list[onnx.NodeProto], weights: dict[str, Any], sizes: list[Any]
) -> onnx.ModelProto:
    """A graph x -> y."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, sizes) for n in ("x", "y"))
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return onnx.shape_inference.infer_shapes(model)


def layer(kind: str) -> onnx.ModelProto:
    """A recurrent layer, whose tokens are the first axis."""
    rng, gates = np.random.default_rng(0), GATES[kind] * WIDTH
    nodes = [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0, 2]),
        helper.make_node(kind, ["xt", "W", "R"], ["h"], "layer", hidden_size=WIDTH),
        helper.make_node("Squeeze", ["h", "one"], ["ht"]),
        helper.make_node("Transpose", ["ht"], ["y"], perm=[1, 0, 2]),
    ]
    weights = {n: rng.standard_normal((1, gates, WIDTH)).astype(np.float32) for n in "WR"}
    return graph_of(nodes, {**weights, "one": np.array([1])}, ["batch", "seq", WIDTH])


def dynamic() -> onnx.ModelProto:
    """A product of integers whose scale is of all tokens."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"], "quantised"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    return graph_of(nodes, {}, ["batch", "seq", WIDTH])


def loop(backwards: bool) -> onnx.ModelProto:
    """h_t = a_t h_{t-1} + x_t, or from the last token to the first."""
    state, a, x = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [WIDTH]) for n in ("h", "a", "x_t")
    )
    after, out = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [WIDTH]) for n in ("h_t", "o")
    )
    inner = [
        helper.make_node("Mul", ["h", "a"], ["ha"]),
        helper.make_node("Add", ["ha", "x_t"], ["h_t"]),
        helper.make_node("Identity", ["h_t"], ["o"]),
    ]
    body = helper.make_graph(inner, "body", [state, a, x], [after, out])
    ways = {"scan_input_directions": [1, 1], "scan_output_directions": [1]} if backwards else {}
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["g"]),
        helper.make_node(
            "Scan", ["start", "g", "x"], ["last", "y"], "loop", body=body, num_scan_inputs=2, **ways
        ),
    ]
    return graph_of(nodes, {"start": np.zeros(WIDTH, np.float32)}, ["seq", WIDTH])


@pytest.mark.parametrize("kind", GATES)
def test_a_recurrent_layer_is_named_though_its_tokens_are_the_first_axis(kind: str) -> None:
    found = first_obstacle(gs.import_onnx(layer(kind)))
    assert found is not None and found.nodes == ("layer",)
    assert found.reason == f"{kind} layer passes its state through a function at every token"


def test_a_scale_of_all_tokens_is_named() -> None:
    model = dynamic()
    found = first_obstacle(gs.import_onnx(model))
    assert found is not None
    assert "DynamicQuantizeLinear quantised takes its scale from the least" in found.reason


@pytest.mark.parametrize("name", ["GRU", "LSTM", "DynamicQuantizeLinear"])
def test_what_mixes_tokens_is_why_a_model_does_not_stream(name: str) -> None:
    model = dynamic() if name not in GATES else layer(name)
    some = State("past", "present", "float32", ("batch", WIDTH), "LinearAttention")
    found = classify(model, [some], "seq")
    assert [node.op for node in found.mixing] == [name]
    assert "from token to token" in found.mixing[0].reason or "all tokens" in found.mixing[0].reason


@pytest.mark.parametrize("backwards", [False, True])
def test_a_loop_that_runs_backwards_is_told_as_that(backwards: bool) -> None:
    found = first_loop(gs.import_onnx(loop(backwards)))
    assert found is not None
    assert ("Scan loop runs backwards over tokens" in found.reason) is backwards


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, 8)."""
        q, k, v = self.p(x).chunk(3, -1)
        return (q.exp() @ k.exp().mT).tril() @ v


SAID = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code"


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_what_the_runtime_says_is_not_a_reason(
    opened: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where nodes do not open, nor where the original ones or the operator do not run."""
    session = prove.session
    count = 0

    class Failing:
        def run(self, *args: Any) -> Any:
            raise RuntimeError(SAID)

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if opened == 0:
            monkeypatch.setattr("onnxruntime.InferenceSession", broken_session)
        return Failing() if opened and count % 2 == opened % 2 else session(*args, **options)

    def broken_session(*args: Any, **options: Any) -> Any:
        raise RuntimeError(SAID)

    monkeypatch.setattr(prove, "session", broken)
    traced = trace(load_module((Attend(), (torch.randn(2, 12, WIDTH),)), "attend:make"))
    found = passes.rewrite(traced.graph, passes.STAGES, traced.weights).findings
    reasons = [one.reason for one in (*found.rejected, *found.unmatched)]
    assert reasons and count
    assert not any("ONNXRuntime" in reason or "status code" in reason for reason in reasons)
