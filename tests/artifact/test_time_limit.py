"""A loop without an end in an artifact of a stranger: a sentence after a time, and a clean end."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import linexport
from linexport.errors import TimeLimitError
from linexport.system import time_limit
from linexport.system.time_limit import limited
from linexport.targets.base import OrtSession
from tests.serving.test_process import process
from tests.support.serving import alone, served

pytestmark = pytest.mark.usefixtures("one_thread")


def endless(model: onnx.ModelProto, name: str, token: int | None = None) -> None:
    """Put a loop without an end before an output: always, or where a token is in the input."""
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
    if token is None:
        graph.initializer.append(numpy_helper.from_array(np.array(True), "for_ever"))
    else:
        graph.initializer.append(numpy_helper.from_array(np.array(token), "token"))
        graph.node.append(helper.make_node("Equal", ["tokens", "token"], ["found"]))
        graph.node.append(helper.make_node("Cast", ["found"], ["numbers"], to=TensorProto.INT32))
        graph.node.append(helper.make_node("ReduceMax", ["numbers"], ["any"], keepdims=0))
        graph.node.append(helper.make_node("Cast", ["any"], ["for_ever"], to=TensorProto.BOOL))
    inputs = ["", "for_ever", "before_loop"]
    graph.node.append(helper.make_node("Loop", inputs, [name], body=body))


def constant(model: onnx.ModelProto, size: int, products: int) -> None:
    """Add products of constant matrices to an output: ONNX Runtime computes them when it opens."""
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["before_sum" if o == "output" else o for o in node.output]
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "zero"))
    graph.initializer.append(numpy_helper.from_array(np.array([size, size]), "square"))
    graph.node.append(helper.make_node("Expand", ["zero", "square"], ["product0"]))
    for i in range(products):
        made = f"product{i + 1}"
        graph.node.append(helper.make_node("MatMul", [f"product{i}", "product0"], [made]))
    graph.node.append(helper.make_node("ReduceMax", [made], ["largest"], keepdims=0))
    graph.node.append(helper.make_node("Cast", ["largest"], ["added"], to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("Add", ["before_sum", "added"], ["output"]))


@pytest.fixture
def changed(converted: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``changed(name, change)``: a copy of an artifact with another graph, and its digests."""

    def make(name: str, change: Callable[[onnx.ModelProto], None]) -> Path:
        folder = Path(shutil.copytree(converted(name), tmp_path / name))
        model = onnx.load(folder / "model.onnx")
        change(model)
        content = model.SerializeToString()
        (folder / "model.onnx").write_bytes(content)
        manifest = json.loads((folder / "manifest.json").read_text())
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"]["model.onnx"] = {"bytes": len(content), "sha256": digest}
        manifest["model_sha256"] = digest
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


@pytest.fixture
def stranger(changed: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda name: changed(name, lambda model: endless(model, "output"))


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


def test_a_request_whose_call_does_not_end_ends_nobody_else(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    """A loop that goes on for one token: its requests get an error, the others their texts."""
    model = linexport.load(
        changed("language_model", lambda model: endless(model, "output", 7)), threads=1
    )
    body = {"model": "tiny", "prompt": [65, 66], "max_tokens": 200, "temperature": 0}
    own = alone(model, b"AB", max_tokens=200)
    with limited(1), served(model) as server, ThreadPoolExecutor(3) as pool:
        text = pool.submit(httpx2.post, f"{server.url}/v1/completions", json=body, timeout=60)
        held = {**body, "prompt": [65, 7]}
        ended = pool.submit(httpx2.post, f"{server.url}/v1/completions", json=held, timeout=60)
        tokens = {"name": "tokens", "shape": [1, 2], "datatype": "INT64", "data": [7, 7]}
        call = f"{server.url}/v2/models/tiny/infer"
        tensor = pool.submit(httpx2.post, call, json={"inputs": [tokens]}, timeout=60)
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        for answer in (ended.result(), tensor.result()):
            assert answer.status_code == 504 and "was ended after 1 s" in answer.text
        assert text.result().json()["choices"][0]["text"] == own
        again = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert again.json()["choices"][0]["text"] == own


@pytest.mark.services
def test_the_program_goes_on_after_a_call_that_was_ended(
    changed: Callable[..., Path], start: Callable[..., Any]
) -> None:
    folder = changed("language_model", lambda model: endless(model, "output", 7))
    with process(start, folder, "--port", 0, "--time-limit", 3) as (running, url):
        body = {"model": folder.name, "max_tokens": 3}
        for prompt, status in (([65, 7], 504), ([65, 66], 200)) * 2:
            answer = httpx2.post(
                f"{url}/v1/completions", json={**body, "prompt": prompt}, timeout=60
            )
            assert answer.status_code == status
        assert running.poll() is None


# Opening ------------------------------------------------------------------------------------------


def test_opening_is_ended_between_two_passes(changed: Callable[..., Path]) -> None:
    folder = changed("small", lambda model: constant(model, 300, 20))
    with (
        limited(0.1),
        pytest.raises(TimeLimitError, match=r"Opening the model was ended after 0.1 s\."),
    ):
        linexport.load(folder, threads=1)
    linexport.load(folder, threads=1)


PATIENT = (
    "from linexport.system import time_limit; time_limit.GRACE = 0.5; import linexport.__main__"
)


def test_a_command_ends_where_opening_a_model_does_not(
    changed: Callable[..., Path], start: Callable[..., Any], tmp_path: Path
) -> None:
    """One product of constant matrices takes minutes: nothing ends it but the process."""
    folder = changed("language_model", lambda model: constant(model, 5000, 1))
    places = tmp_path / "temporary"
    places.mkdir()
    begin = f"import tempfile; kept = tempfile.TemporaryDirectory(dir={str(places)!r}); {PATIENT}"
    options = ("--prompt", "ab", "--threads", "1", "--time-limit", "1", "--json")
    program = ("-c", f"{begin}; linexport.__main__.main()")
    process = start("generate", folder, *options, program=program)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5, err
    assert json.loads(out)["message"].startswith("Opening the model was ended after 1 s.")
    assert not err and not list(places.iterdir())


def test_a_call_that_does_not_end_is_said(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime ends no node: the function that ends the process is called."""
    monkeypatch.setattr(time_limit, "GRACE", 0.1)
    monkeypatch.setattr(time_limit, "_BETWEEN", 0.02)
    session = OrtSession(changed("small", lambda model: multiplied(model, 900)) / "model.onnx", 1)
    said: list[str] = []
    fed = {
        i.name: np.zeros([d if isinstance(d, int) else 1 for d in i.shape], np.float32)
        for i in session.inner.get_inputs()
    }
    with limited(0.1, said.append), pytest.raises(TimeLimitError):
        session.run(fed)
    assert said and said[0].startswith("A call of the model was ended after 0.1 s.")


def multiplied(model: onnx.ModelProto, size: int) -> None:
    """Add a product of matrices that depends on the input, in integers, to an output."""
    constant(model, size, 1)
    first = model.graph.input[0].name
    expand = next(node for node in model.graph.node if node.output[0] == "product0")
    expand.input[0] = "whole"
    nodes = [
        helper.make_node("ReduceMax", [first], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["whole"], to=TensorProto.INT64),
    ]
    model.graph.node.extend(nodes)
