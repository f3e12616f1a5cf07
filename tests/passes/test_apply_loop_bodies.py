"""Layers that a Loop or Scan runs a known number of times are fused, each with its own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import linexport
from linexport import passes
from linexport.graph.walk import all_graphs, subgraphs
from linexport.sources.factory import load_module
from linexport.sources.onnx_file import load_onnx_file
from linexport.trace import plain_export, trace
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

DYNAMIC = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


class Layers(nn.Module):
    """Three layers that share their weights, by a loop of Python."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.scales = nn.Parameter(torch.rand(3, 16))

    def layer(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.project(F.layer_norm(x, (16,))).chunk(3, -1)
        return x + scale * self.out((q.relu() @ k.relu().mT).tril() @ v)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 16)."""
        for i in range(3):
            x = self.layer(x, self.scales[i])
        return x


class While(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.layer(x, self.scales.index_select(0, i[None])[0])

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, x: i < 3, body, (start, x))[1]


class Nested(Layers):
    def forward(self, x: Tensor) -> Tensor:
        """Two layers, thrice."""

        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.layer(x, self.scales[1])

        def outer(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            start = torch.zeros((), dtype=torch.int64)
            return i + 1, while_loop(lambda j, x: j < 2, body, (start, x))[1]

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, x: i < 3, outer, (start, x))[1]


class Nests(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.layer(x, self.scales[1])
        return x


class OfData(Layers):
    """The tokens decide how many layers there are."""

    def forward(self, x: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.layer(x, self.scales[0])

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, x: i < 1 + (x.sum() > 0), body, (start, x))[1]


def loaded(kind: type[Layers]) -> Any:
    return load_module((kind().eval(), (torch.randn(2, 12, 16),), DYNAMIC), "tests:loop")


@pytest.mark.parametrize(("kind", "twin", "count"), [(While, Layers, 3), (Nested, Nests, 6)])
def test_layers_in_a_loop_stream(
    tmp_path: Path, kind: type[Layers], twin: type[Layers], count: int
) -> None:
    manifest = linexport.convert(loaded(kind), tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    assert manifest.fused["LinearAttention"] == count
    assert not any("fails" in warning for warning in manifest.warnings)
    check_independently(tmp_path / "a", twin().eval(), 16, lengths=(1, 7, 130))


def test_nodes_of_bodies_count(tmp_path: Path) -> None:
    """In what is exported as in what the artifact has."""
    path, nodes = plain_export(loaded(While), tmp_path)
    graph = onnx.load(path).graph
    assert bodies(graph) and nodes == sum(len(g.node) for g in (graph, *bodies(graph)))
    file = load_onnx_file(path, seed=0).graph
    assert file is not None and file.nodes == nodes


def test_a_loop_of_a_file_is_the_same(tmp_path: Path) -> None:
    model = trace(loaded(While)).graph
    assert any(n.op_type == "Loop" for n in model.graph.node)
    for graph in all_graphs(model):
        del graph.value_info[:]
    onnx.save(model, tmp_path / "loop.onnx")
    manifest = linexport.convert(tmp_path / "loop.onnx", tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 3
    check_independently(tmp_path / "a", Layers().eval(), 16, lengths=(1, 7, 130))


def bodies(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Of the nodes of a graph, which have none themselves."""
    return [body for node in graph.node for body in subgraphs(node)]


def test_a_number_of_steps_that_data_decides_is_the_reason(tmp_path: Path) -> None:
    manifest = linexport.convert(loaded(OfData), tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and not manifest.fused
    (rejected,) = manifest.rejected
    assert "a body of Loop" in rejected.reason and "not a constant up to 128" in rejected.reason
    graph = onnx.load(tmp_path / "a" / "model.onnx").graph
    assert manifest.nodes.artifact == sum(len(g.node) for g in (graph, *bodies(graph)))


def test_more_steps_than_a_model_has_layers_stay_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linexport.passes.apply_loop_bodies.MOST_STEPS", 2)
    model = passes.rewrite(trace(loaded(While)).graph, passes.STATELESS).model
    assert "Loop" in [n.op_type for n in model.graph.node]


STACKED = """
<ir_version: 10, opset_import: ["": 20]>
layers (float[batch, seq, 16] x, float[3, 16] scales) => (float[batch, seq, 16] y, float[3] sums) {
    y, sums = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
        body = layer (float[batch, seq, 16] before, float[16] scale)
            => (float[batch, seq, 16] after, float sum) {
        v = Tanh (before)
        q = Relu (v)
        k = Transpose <perm = [0, 2, 1]> (q)
        scores = MatMul (q, k)
        masked = Trilu <upper = 0> (scores)
        read = MatMul (masked, v)
        scaled = Mul (read, scale)
        after = Add (before, scaled)
        sum = ReduceSum <keepdims = 0> (scale)
    }> (x, scales)
}
"""


def test_layers_of_a_scan_take_their_weights_in_its_order() -> None:
    """The last layer is the first here, and what the steps give is stacked from the end."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(STACKED))
    rewritten = passes.rewrite(model, passes.STATELESS).model
    operators = [n.op_type for n in rewritten.graph.node]
    assert operators.count("LinearAttention") == 3 and "Scan" not in operators
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(size=(2, 9, 16)).astype(np.float32),
        "scales": random.normal(size=(3, 16)).astype(np.float32),
    }
    unrolled = passes.rewrite(model, passes.STATELESS, stop_after="apply_loop_bodies").model
    expected, got = (_session(m).run(None, feeds) for m in (model, unrolled))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString())
