"""Clients that leave, do not read, do not send, or may not ask; and what others notice of them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import linexport
from linexport.artifact import Artifact
from tests.support.serving import POISON, Served, alone, changed, eventually, served

pytestmark = pytest.mark.usefixtures("one_thread")

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def slow(converted: Callable[..., Path]) -> Artifact:
    """A model whose calls take 20 ms, and whose logits are NaN after one byte."""
    return changed(
        linexport.load(converted("language_model"), threads=1), seconds=0.02, poisoned=True
    )


@pytest.fixture(scope="module")
def server(slow: Artifact) -> Iterator[Served]:
    """Two slots, and a queue of one."""
    with served(slow, slots=2, queue=1, request_seconds=1, max_body=4096) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[httpx2.Client]:
    eventually(server.idle)
    with httpx2.Client(base_url=server.url, timeout=20) as found:
        yield found


def asked(prompt: str = "x", tokens: int = 2000, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


@contextlib.contextmanager
def connection(server: Served, buffer: int = 2**16) -> Iterator[socket.socket]:
    with socket.socket() as found:
        found.settimeout(20)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        found.connect(("127.0.0.1", server.port))
        yield found


def answered(raw: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(65536):
            found += piece
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: Served, stream: bool) -> None:
    eventually(server.idle)
    with connection(server) as raw:
        raw.sendall(request(asked(stream=stream)))
        eventually(lambda: server.engine.sessions == 1)
    eventually(server.idle)


def test_a_client_that_leaves_the_queue_is_forgotten(server: Served) -> None:
    eventually(server.idle)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connection(server)).sendall(request(asked()))
        eventually(lambda: server.engine.sessions == 2)
        with connection(server) as third:
            third.sendall(request(asked()))
            eventually(lambda: server.engine.waiting == 1)
        eventually(lambda: server.engine.waiting == 0)
        assert server.engine.sessions == 2


def test_a_full_queue_is_429_with_a_time(server: Served, client: httpx2.Client) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connection(server)).sendall(request(asked()))
        eventually(lambda: server.engine.waiting == 1)
        found = client.post("/v1/completions", json=asked())
        assert found.status_code == 429
        assert 1 <= int(found.headers["Retry-After"]) <= 60
        assert found.json()["error"]["code"] == "queue_full"
    eventually(server.idle)
    assert client.post("/v1/completions", json=asked(tokens=1)).status_code == 200


def test_logits_that_are_nan_end_that_text_alone(
    server: Served, client: httpx2.Client, model: Artifact
) -> None:
    with client.stream("POST", "/v1/completions", json=asked("ab", 40, stream=True)) as other:
        lines = other.iter_lines()
        next(lines)
        for stream in (False, True):
            found = client.post("/v1/completions", json=asked(f"a{chr(POISON)}", stream=stream))
            assert (found.status_code, found.json()["error"]["code"]) == (500, "non_finite")
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(p["choices"][0]["text"] for p in pieces)
    assert text == alone(model, b"ab", max_tokens=40)[1:]
    eventually(server.idle)


def test_an_error_in_mid_stream_is_an_event(server: Served, client: httpx2.Client) -> None:
    """Of two texts of one prompt, sampled, one meets the poisoned byte before its end."""
    found = client.post(
        "/v1/completions", json=asked("x", 4000, temperature=1, seed=1, stream=True), timeout=60
    )
    last = [line for line in found.text.splitlines() if line][-1]
    assert json.loads(last[6:])["error"]["code"] == "non_finite"
    eventually(server.idle)


def test_a_client_that_does_not_read_is_cut_off_and_slows_nobody(model: Artifact) -> None:
    limits = {"slots": 2, "buffer": 50, "max_tokens": 10**6}
    with served(model, **limits) as server, connection(server, 4096) as raw:
        raw.sendall(request(asked(tokens=10**6, stream=True, logprobs=20)))
        eventually(lambda: server.engine.sessions == 1)
        found = httpx2.post(f"{server.url}/v1/completions", json=asked("y", 30), timeout=20)
        assert found.json()["choices"][0]["text"] == alone(model, b"y", max_tokens=30)
        eventually(server.idle)
        eventually(lambda: server.service.metrics.cancelled._value.get() == 1)
        assert b"[DONE]" not in answered(raw)


def test_a_request_that_does_not_come_is_not_waited_for(server: Served) -> None:
    """Nothing sent, half a header, a header a byte at a time, half a body."""
    whole = request(asked())
    starts = [b"", whole[:30], whole[:-5]]
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(connection(server)) for _ in range(4)]
        for raw, start in zip(raws, starts, strict=False):
            raw.sendall(start)
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in whole:
                raws[3].sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - begun < len(whole) * 0.05
        assert [answered(raw) for raw in raws[:2]] == [b"", b""]
        assert answered(raws[2]).startswith(b"HTTP/1.1 408 ")
    eventually(server.idle)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNK = b"1000\r\n" + b"x" * 4096 + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n", 400),
        (POST + b"Content-Length: 5000\r\n\r\n", 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + 2 * CHUNK, 413),
        (b"GET /health/live HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (POST + b"Origin: https://evil.example\r\nContent-Length: 2\r\n\r\n{}", 403),
    ],
    ids=["headers", "path", "tls", "hosts", "length", "chunks", "rebinding", "origin"],
)
def test_requests_that_no_client_of_ours_sends(server: Served, sent: bytes, status: int) -> None:
    with connection(server) as raw:
        with contextlib.suppress(OSError):  # refused while more is sent
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
        assert answered(raw).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 4000, "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'{"model": "tiny", "prompt": {}}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "x", "seed": 1e999}', "invalid_value"),
        (b'{"model": "tiny", "prompt": [99999999999999999999999]}', "invalid_value"),
    ],
)
def test_bodies_that_are_no_request(client: httpx2.Client, body: bytes, code: str | None) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        found = client.post(path, content=body)
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert path.endswith("chat/completions") or error["code"] == code


def test_unknown_paths_and_methods(client: httpx2.Client) -> None:
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found."
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/v2/nothing").json() == {"error": "Not Found."}


def test_a_token_is_asked_for_everywhere_but_where_nothing_is_told(model: Artifact) -> None:
    with served(model, token=TOKEN) as server, httpx2.Client(base_url=server.url) as client:
        for path in ("/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200, path
        for path in ("/metrics", "/v1/models", "/v2", "/v2/models/tiny"):
            for given in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}):
                found = client.get(path, headers=given)
                assert found.status_code == 401, path
                assert found.headers["WWW-Authenticate"] == "Bearer"
            good = {"Authorization": f"Bearer {TOKEN}", "Host": "elsewhere.example"}
            assert client.get(path, headers=good).status_code == 200, path


def test_metrics_count_what_happened(model: Artifact) -> None:
    with served(model, slots=3) as server, httpx2.Client(base_url=server.url) as client:
        client.post("/v1/completions", json=asked("abc", 5))
        client.post("/v1/completions", json={})
        lines = client.get("/metrics").text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert {name: float(found[f"linexport_{name}"]) for name in EXPECTED} == EXPECTED


EXPECTED = {
    "slots": 3,
    "sessions": 0,
    "queue": 0,
    "prompt_tokens_total": 3,
    "generated_tokens_total": 5,
    "time_to_first_token_seconds_count": 1,
    "time_between_tokens_seconds_count": 4,
    'requests_total{path="/v1/completions",status="200"}': 1,
    'requests_total{path="/v1/completions",status="400"}': 1,
}


def test_the_log_has_a_line_of_json_for_every_answer_and_nothing_of_a_text(
    server: Served, client: httpx2.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    client.post("/v1/completions?secret=query", json=asked("secret prompt", 3))
    client.get("/nowhere")
    lines = capfd.readouterr().err.splitlines()
    first, second = map(json.loads, lines)
    assert (first["path"], first["status"], first["completion_tokens"]) == (
        "/v1/completions",
        200,
        3,
    )
    assert {"time", "client", "method", "seconds", "bytes", "id", "prompt_tokens"} <= set(first)
    assert (second["path"], second["status"]) == ("/nowhere", 404)
    assert not any("secret" in line for line in lines)
