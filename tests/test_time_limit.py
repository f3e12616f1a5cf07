"""A loop without an end in an artifact of a stranger: a sentence after a time, and a clean end."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import linexport
from linexport.errors import TimeLimitError
from linexport.system.time_limit import limited
from linexport.targets.base import OrtSession

pytestmark = pytest.mark.usefixtures("one_thread")


def endless(model: onnx.ModelProto, name: str) -> None:
    """Put a loop before an output that goes on for as long as a condition that stays true."""
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["before_loop" if o == name else o for o in node.output]
    shapes = {"i": (TensorProto.INT64, ()), "s": (TensorProto.FLOAT, ("a", "b", "c"))}
    shapes |= {"c": (TensorProto.BOOL, ()), "more": (TensorProto.BOOL, ()), "next": shapes["s"]}
    infos = {n: helper.make_tensor_value_info(n, *described) for n, described in shapes.items()}
    taken, made = [infos[n] for n in "ics"], [infos[n] for n in ("more", "next")]
    nodes = [
        helper.make_node("Identity", ["c"], ["more"]),
        helper.make_node("Neg", ["s"], ["next"]),
    ]
    body = helper.make_graph(nodes, "body", taken, made)
    graph.initializer.append(numpy_helper.from_array(np.array(True), "for_ever"))
    inputs = ["", "for_ever", "before_loop"]
    graph.node.append(helper.make_node("Loop", inputs, [name], body=body))


@pytest.fixture
def stranger(converted: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        folder = Path(shutil.copytree(converted(name), tmp_path / name))
        model = onnx.load(folder / "model.onnx")
        endless(model, "output")
        content = model.SerializeToString()
        (folder / "model.onnx").write_bytes(content)
        manifest = json.loads((folder / "manifest.json").read_text())
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"]["model.onnx"] = {"bytes": len(content), "sha256": digest}
        manifest["model_sha256"] = digest
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


@pytest.mark.parametrize("command", ["generate", "validate", "bench"])
def test_a_loop_without_an_end_is_ended(
    command: str,
    stranger: Callable[[str], Path],
    cli: Callable[..., Any],
    factories: SimpleNamespace,
) -> None:
    name = "language_model" if command == "generate" else "small"
    folder = stranger(name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = ("--prompt", "ab") if command == "generate" else ("--source", factories.source(name))
    start = time.perf_counter()
    done = cli(command, folder, *options, "--threads", "1", "--time-limit", "1", "--json")
    assert done.code == 5
    assert done.json()["message"].startswith("A call of the model was ended after 1 s.")
    assert time.perf_counter() - start < 60
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_limit_that_is_not_reached_changes_nothing(converted: Callable[..., Path]) -> None:
    opened = linexport.load(converted("small"), threads=1)
    x = np.ones((1, 3, 8), np.float32)
    expected = opened.run(x)["output"]
    with limited(30):
        np.testing.assert_array_equal(opened.run(x)["output"], expected)
        with pytest.raises(Exception, match="Required inputs"):
            opened._session.run({"x": x})  # type: ignore[attr-defined]


def test_a_session_runs_again_after_a_call_that_was_ended(stranger: Callable[[str], Path]) -> None:
    session = OrtSession(stranger("small") / "model.onnx", threads=1)
    fed = {
        i.name: np.zeros([d if isinstance(d, int) else 1 for d in i.shape], np.float32)
        for i in session.inner.get_inputs()
    }
    for _ in range(2):
        with limited(0.3), pytest.raises(TimeLimitError):
            session.run(fed)
