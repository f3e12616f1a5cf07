"""The Open Inference Protocol, spoken by Triton's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import linexport
from linexport.artifact import Artifact
from tests.support.serving import Served, eventually, served

pytestmark = pytest.mark.usefixtures("one_thread")

INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Artifact:
    """Takes x (batch, seq, 8) in float32, and streams."""
    return linexport.load(converted("small"), threads=1)


@pytest.fixture(scope="module")
def server(model: Artifact) -> Iterator[Served]:
    with served(model, slots=2, queue=1, chunk=4, max_prompt=64) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    eventually(lambda: not server.engine.sessions)
    found = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    yield found
    found.close()


def draw(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, length, 8)).astype(np.float32)


def infer(client: Any, x: np.ndarray, *, binary: bool = True, **sequence: Any) -> np.ndarray:
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    outputs = [triton.InferRequestedOutput("output", binary_data=binary)]
    found = client.infer("tiny", [tensor], outputs=outputs, **sequence).as_numpy("output")
    assert isinstance(found, np.ndarray)
    return found


def test_server_and_model_are_described(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "linexport"
    found = client.get_model_metadata("tiny")
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1, 8]}]
    assert [o["name"] for o in found["outputs"]] == ["output"]


@pytest.mark.parametrize("binary", [True, False])
def test_whole_sequences_of_any_batch(client: Any, model: Artifact, binary: bool) -> None:
    x = draw(3, 7)
    np.testing.assert_allclose(infer(client, x, binary=binary), model.run(x)["output"], rtol=1e-6)


def test_all_outputs_are_binary_unless_some_are_named(client: Any, model: Artifact) -> None:
    tensor = triton.InferInput("x", [1, 2, 8], "FP32")
    tensor.set_data_from_numpy(draw(1, 2))
    found = client.infer("tiny", [tensor], request_id="mine")
    assert found.get_response()["id"] == "mine"
    expected = model.run(draw(1, 2))["output"]
    np.testing.assert_allclose(found.as_numpy("output"), expected, rtol=1e-6)


@pytest.mark.parametrize("name", [5, "five"])
def test_a_sequence_goes_on_from_request_to_request(
    server: Served, client: Any, model: Artifact, name: int | str
) -> None:
    x = draw(1, 13)
    pieces = [
        infer(client, x[:, :6], sequence_id=name, sequence_start=True),  # more than a chunk
        infer(client, x[:, 6:7], sequence_id=name),
        infer(client, x[:, 7:], sequence_id=name, sequence_end=True),
    ]
    found = np.concatenate(pieces, 1)
    np.testing.assert_allclose(found, model.run(x)["output"], atol=1e-5)
    eventually(lambda: not server.engine.sessions)


def test_sequences_do_not_see_each_other(client: Any, model: Artifact, server: Served) -> None:
    """Two at once, in turns, and what was left of one is not there for another."""
    xs = [draw(1, 6, seed) for seed in range(2)]
    steps: list[list[np.ndarray]] = [[], []]
    for at in range(6):
        for i, x in enumerate(xs):
            more = {"sequence_start": at == 0, "sequence_end": at == 5}
            steps[i].append(infer(client, x[:, at : at + 1], sequence_id=i + 1, **more))
    for x, found in zip(xs, steps, strict=True):
        np.testing.assert_allclose(np.concatenate(found, 1), model.run(x)["output"], atol=1e-5)
    infer(client, xs[0], sequence_id=9, sequence_start=True)
    again = infer(client, xs[1], sequence_id=9, sequence_start=True, sequence_end=True)
    np.testing.assert_allclose(again, model.run(xs[1])["output"], atol=1e-5)


def test_a_number_and_a_text_are_two_sequences(client: Any) -> None:
    infer(client, draw(1, 1), sequence_id=5, sequence_start=True)
    with pytest.raises(InferenceServerException, match="not open"):
        infer(client, draw(1, 1), sequence_id="5")
    infer(client, draw(1, 1), sequence_id=5, sequence_end=True)


def test_a_sequence_that_was_left_frees_its_slot(model: Artifact) -> None:
    with served(model, slots=1, idle_seconds=1) as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
        infer(client, draw(1, 1), sequence_id=1, sequence_start=True)
        assert server.engine.sessions == 1
        infer(client, draw(1, 1), sequence_id=2, sequence_start=True, sequence_end=True)
        with pytest.raises(InferenceServerException, match="sequence 1 is not open"):
            infer(client, draw(1, 1), sequence_id=1)
        client.close()


def test_nan_in_an_input_ends_that_sequence_alone(client: Any, model: Artifact) -> None:
    x = draw(1, 4)
    first = infer(client, x[:, :2], sequence_id=1, sequence_start=True)
    with pytest.raises(InferenceServerException, match="NaN"):
        infer(client, np.full_like(x, np.nan), sequence_id=2, sequence_start=True)
    rest = infer(client, x[:, 2:], sequence_id=1, sequence_end=True)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), model.run(x)["output"], atol=1e-5)


def test_full_slots_are_an_error_in_the_protocols_form(server: Served, client: Any) -> None:
    for name in (1, 2):
        infer(client, draw(1, 1), sequence_id=name, sequence_start=True)
    body = described(parameters={"sequence_id": 3, "sequence_start": True})
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(httpx2.post, f"{server.url}{INFER}", json=body, timeout=20)
        eventually(lambda: server.engine.waiting == 1)
        found = httpx2.post(f"{server.url}{INFER}", json=body)
        assert (found.status_code, set(found.json())) == (429, {"error"})
        for name in (1, 2):
            infer(client, draw(1, 1), sequence_id=name, sequence_end=True)
        assert first.result().status_code == 200
    infer(client, draw(1, 1), sequence_id=3, sequence_end=True)


def described(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 1, 8], "datatype": "FP32", "data": [0.5] * 8}
    return {"inputs": [{**tensor, **changes.pop("tensor", {})}], **changes}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "inputs"),
        (described(tensor={"name": "y"}), "expected ['x']"),
        (described(tensor={"shape": [1, 1, 7]}), "does not fit"),
        (described(tensor={"shape": [1, 1, -8]}), "inputs.0.shape.2"),
        (described(tensor={"shape": [1] * 17}), "inputs.0.shape"),
        (described(tensor={"shape": [2**31, 2**31, 8]}), "inputs.0.shape"),
        (described(tensor={"datatype": "FP31"}), "datatype 'FP31'"),
        (described(tensor={"datatype": "BYTES"}), "datatype 'BYTES'"),
        (described(tensor={"datatype": "INT64"}), "does not fit"),
        (described(tensor={"datatype": "FP64"}), None),
        (described(tensor={"data": ["a"] * 8}), "inputs.0.data.0: expected a number"),
        (described(tensor={"data": [[1], [2, 3]]}), "inputs.0.data: its lists have several"),
        (described(tensor={"data": [0.1] * 800, "shape": [1, 100, 8]}), "100 tokens"),
        (described(outputs=[{"name": "z"}]), "output 'z'"),
        (described(tensor={"parameters": {"binary_data_size": 4}}), "0 bytes are there"),
        (described(parameters={"sequence_id": 4}), "not open"),
        (described(parameters={"sequence_id": [4]}), "sequence_id"),
        (
            described(
                tensor={"data": [0.1] * 16, "shape": [2, 1, 8]},
                parameters={"sequence_id": 4, "sequence_start": True},
            ),
            "2 rows",
        ),
        ({**described(), "colour": 1}, "colour"),
    ],
)
def test_wrong_requests(server: Served, body: dict[str, Any], words: str | None) -> None:
    found = httpx2.post(f"{server.url}{INFER}", json=body)
    if words is None:
        assert found.status_code == 200
    else:
        assert found.status_code == 400 and words in found.json()["error"]
    assert not server.engine.sessions


@pytest.mark.parametrize(
    ("length", "tail", "words"),
    [
        ("x", b"", "Inference-Header-Content-Length is 'x'"),
        ("99999", b"", "Inference-Header-Content-Length is '99999'"),
        (None, b"1234", "not JSON"),
        ("all", b"1" * 31, "31 bytes are there"),
        ("all", b"1" * 33, "1 bytes of the body belong to no input"),
    ],
)
def test_wrong_binary_bodies(server: Served, length: str | None, tail: bytes, words: str) -> None:
    tensor = {"data": None, "parameters": {"binary_data_size": 32}}
    head = json.dumps(described(tensor=tensor)).encode()
    named = str(len(head)) if length == "all" else length
    headers = {} if named is None else {"Inference-Header-Content-Length": named}
    found = httpx2.post(f"{server.url}{INFER}", content=head + tail, headers=headers)
    assert found.status_code == 400 and words in found.json()["error"]


def test_a_model_of_no_texts_says_so_to_openais_clients(server: Served) -> None:
    found = httpx2.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "no_text")


def test_a_model_without_state_has_whole_calls_alone(converted: Callable[..., Path]) -> None:
    model = linexport.load(converted("parts"), threads=1)
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    with served(model) as server:
        body = {"inputs": [{"name": "x", "shape": [2, 3, 6], "datatype": "FP32",
                            "data": x.ravel().tolist()}]}  # fmt: skip
        found = httpx2.post(f"{server.url}{INFER}", json=body).json()
        for output, expected in zip(found["outputs"], model.run(x).values(), strict=True):
            np.testing.assert_allclose(output["data"], expected.ravel(), rtol=1e-5)
        body["parameters"] = {"sequence_id": 1, "sequence_start": True}  # type: ignore[assignment]
        found = httpx2.post(f"{server.url}{INFER}", json=body)
        assert found.status_code == 400 and "does not stream" in found.json()["error"]
