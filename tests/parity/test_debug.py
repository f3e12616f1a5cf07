"""The search for the first value, token and state that differ from the original."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import linexport
from linexport.parity.bisection import Ancestry, first_different
from linexport.sources.factory import load_module

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.integers(1, 60), st.integers(0, 59), st.integers(1, 9), st.randoms())
def test_the_search_finds_the_one_node_that_is_wrong(
    count: int, wrong: int, width: int, random: Any
) -> None:
    """Of any graph: every value computed from a wrong one is wrong."""
    nodes = []
    for i in range(count):
        parents = [f"v{j}" for j in range(i) if random.random() < 0.3] or ["x"]
        nodes.append(helper.make_node("Sum", parents, [f"v{i}"]))
    ancestry, first = Ancestry(nodes), f"v{wrong % count}"
    spoilt = {v for v in ancestry.producer if first in (v, *ancestry.ancestors(v))}
    asked: list[int] = []

    def differ(names: Any) -> dict[str, bool]:
        asked.append(len(names))
        return {name: name in spoilt for name in names}

    found = first_different(
        max(spoilt, key=ancestry.order.get), ancestry, spoilt | {*ancestry.producer}, differ, width
    )
    assert found.value == first
    assert found.runs == len(asked) and max(asked, default=0) <= width


@pytest.fixture
def wrong_artifact(
    factories: SimpleNamespace, miscompile: Callable[..., None], tmp_path: Path
) -> Path:
    """A language model whose second attention alone is lowered wrongly."""
    place = tmp_path / "artifact"
    linexport.convert(
        factories.source("language_model"), place, target="onnx", bench=False, threads=1
    )
    model = onnx.load(place / "model.onnx")
    spoil_second_attention(model)
    onnx.save(model, place / "model.onnx")
    trust(place)
    return place


def spoil_second_attention(model: onnx.ModelProto) -> None:
    """Its output is multiplied by 1.01 under its own name."""
    node = [n for n in model.graph.node if n.op_type == "LinearAttention"][1]
    value = node.output[0]
    node.output[0] = f"{value}/right"
    factor = onnx.numpy_helper.from_array(np.float32(1.01), "factor")
    model.graph.initializer.append(factor)
    place = list(model.graph.node).index(node) + 1
    model.graph.node.insert(
        place, helper.make_node("Mul", [node.output[0], "factor"], [value], name="spoilt")
    )


def trust(artifact: Path) -> None:
    """Record the files as they are now."""
    from linexport.manifest import MODEL, describe_files, read, to_json

    manifest = read(artifact)
    files = describe_files(artifact)
    kept = {name: files[name] for name in manifest.files}
    changed = replace(manifest, files=kept, model_sha256=files[MODEL].sha256)
    (artifact / "manifest.json").write_text(json.dumps(to_json(changed)))


def test_the_first_wrong_node_is_found_and_can_be_repeated(
    wrong_artifact: Path, factories: SimpleNamespace, cli: Callable[..., Any], tmp_path: Path
) -> None:
    source = ("--source", factories.source("language_model"), "--threads", 1)
    repro = tmp_path / "repro"
    found = cli("debug", wrong_artifact, *source, "--json", "-o", repro)
    assert found.code == 3, found.err
    value = found.json()["value"]
    assert (value["node"], value["op"], value["verdict"]) == ("spoilt", "Mul", "own error")
    assert value["layer"] == "blocks.1.attention"
    assert (value["row"], value["token"]) == (0, 0)
    assert value["own_error"] == pytest.approx(0.01, rel=0.05)
    assert "functional" in value["code"] or "attention" in value["code"]
    assert value["runs"] <= 5
    alone = subprocess.run(
        [sys.executable, str(repro / "run.py")], capture_output=True, text=True, check=True
    )
    assert "of the original: " in alone.stdout and "off by 1.0" in alone.stdout
    assert "linexport" not in (repro / "run.py").read_text()
    text = cli("debug", wrong_artifact, *source).out
    assert "blocks.1.attention" in text and "own error" in text


def test_an_artifact_that_is_right_has_nothing_to_find(
    artifact: Path, factories: SimpleNamespace, cli: Callable[..., Any]
) -> None:
    source = ("--source", factories.source("small"), "--threads", 1)
    done = cli("debug", artifact, *source)
    assert done.code == 0 and "no output or state differs" in done.out
    assert cli("debug", artifact, *source, "--length", 5, "--json").json()["sizes"]["seq"] == 5


def test_the_first_state_that_differs_is_named(factories: SimpleNamespace, artifact: Path) -> None:
    """A state that is wrong while every output is right: only what comes next would show it."""
    place = artifact
    model = onnx.load(place / "model.onnx")
    node = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    present = node.output[1]
    node.output[1] = "state/right"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1.01), "factor"))
    model.graph.node.append(
        helper.make_node("Mul", ["state/right", "factor"], [present], name="spoilt")
    )
    onnx.save(model, place / "model.onnx")
    trust(place)
    found = linexport.debug(place, source=factories.source("small"), threads=1)
    assert found.value is None and found.state is not None
    assert found.state.name == present
    assert found.state.max_relative_error == pytest.approx(0.01, rel=0.05)


class Loop(torch.nn.Module):
    """A recurrence token by token between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)

    def forward(self, x):
        a, b = self.gates(x).chunk(2, -1)
        h, found = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(torch.sigmoid(a[:, t]) * h) + b[:, t]
            found.append(h.exp())
        return self.out(torch.stack(found, 1))


def test_values_around_a_loop_over_tokens_are_compared(tmp_path: Path) -> None:
    """Its program has seven steps: those of other lengths are no values of the original's."""
    source = load_module((Loop(), (torch.randn(2, 9, 8),)), "tests:loop")
    artifact = tmp_path / "artifact"
    linexport.convert(source, artifact, bench=False, threads=1)
    model = onnx.load(artifact / "model.onnx")
    at, node = next((i, n) for i, n in enumerate(model.graph.node) if n.op_type == "Split")
    value = node.output[0]
    node.output[0] = f"{value}/right"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1.5), "factor"))
    spoilt = helper.make_node("Mul", [f"{value}/right", "factor"], [value], name="spoilt")
    model.graph.node.insert(at + 1, spoilt)
    onnx.save(model, artifact / "model.onnx")
    trust(artifact)
    found = linexport.debug(artifact, source=source, threads=1, length=12)
    assert found.value is not None
    assert (found.value.node, found.value.verdict) == ("spoilt", "own error")


def test_time_and_error_of_every_node_are_written(
    artifact: Path, factories: SimpleNamespace, cli: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / "overlay"
    source = ("--source", factories.source("small"), "--threads", 1)
    assert cli("debug", artifact, *source, "--overlay", place).code == 0
    graph = onnx.load(artifact / "model.onnx").graph
    names, found = {n.name for n in graph.node}, {}
    for file in ("times", "errors"):
        content = json.loads((place / f"{file}.json").read_text())[graph.name]
        assert [stop["stop"] for stop in content["gradient"]] == [0, 1]
        found[file] = {name: one["value"] for name, one in content["results"].items()}
        assert found[file].keys() <= names
    attention = next(n.name for n in graph.node if n.op_type == "LinearAttention")
    assert found["times"][attention] > 0
    assert 0 < found["errors"][attention] < 5e-5
    again = cli("debug", artifact, *source, "--overlay", place)
    assert again.code == 2 and str(place) in again.err


def test_time_of_what_onnx_runtime_made_counts_for_what_it_leads_to(tmp_path: Path) -> None:
    """An identity is not run; a product and what follows it may be one node."""
    from linexport.timing.nodes import node_times

    weights = [onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "w")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("Identity", ["y"], ["same"], name="same"),
        helper.make_node("Relu", ["same"], ["z"], name="last"),
    ]
    shape = [None, 8]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    z = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, shape)
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [z], weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(model, tmp_path / "model.onnx")
    times = node_times(tmp_path / "model.onnx", {"x": np.ones((64, 8), np.float32)}, 1)
    assert "same" not in times and {"last"} <= times.keys() <= {"product", "last"}
