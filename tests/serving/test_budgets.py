"""Requests that are small and cost much: refused before the work, while others are answered."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser
from starlette.responses import Response

import linexport
from linexport.artifact import Artifact
from linexport.graph.footprint import Footprint
from linexport.serving.call_memory import CallMemory
from linexport.serving.computing import LocalComputing
from linexport.serving.http import accepting, inference, json_reader, pieces
from linexport.serving.http.accepting import Acceptor
from linexport.serving.http.budget import Budget
from linexport.serving.http.connection import HEADER_BYTES, HEADERS
from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.json_reader import ElementError, JsonError, JsonReader
from linexport.serving.http.json_writer import encoded, largest
from linexport.serving.http.openai_answers import Answer
from linexport.serving.http.pieces import AT_ONCE, PART, PieceReader, TurnQueue
from linexport.serving.http.server import Address, Server, listen, serve
from linexport.serving.limits import Limits
from linexport.serving.service import Service
from tests.support.serving import Served, alone, eventually, served

pytestmark = pytest.mark.usefixtures("one_thread")

INFER, TEXT, CHAT = "/v2/models/tiny/infer", "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Artifact:
    return linexport.load(converted("language_model"), threads=1)


@pytest.fixture(scope="module")
def server(model: Artifact) -> Iterator[Served]:
    with served(model) as found:
        yield found


def tokens(count: int, **more: Any) -> dict[str, Any]:
    data = {"name": "tokens", "shape": [1, count], "datatype": "INT64", "data": [1] * count}
    return {"inputs": [{**data, **more}]}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **fields}


COSTLY: dict[str, tuple[str, Any, int, str]] = {
    "a wide text among numbers": (
        *(INFER, tokens(4001, data=["a" * 100_000] + ["b"] * 4000), 400),
        "inputs.0.data.0: expected a number",
    ),
    "a text behind numbers": (
        *(INFER, tokens(4001, data=[1] * 4000 + ["a" * 100_000]), 400),
        "inputs.0.data.4000: expected a number",
    ),
    "an output eight times": (
        *(INFER, {**tokens(2048), "outputs": [{"name": "output"}] * 8}, 400),
        "'output' twice",
    ),
    "a long answer in JSON": (INFER, tokens(32_768), 413, "at most 33,554,432"),
    "wrong prompts": (TEXT, text(prompt=[{}] * 200_000), 400, "prompt.0: expected a text or"),
    "wrong prompts of prompts": (TEXT, text(prompt=[[{}]] * 200_000), 400, "prompt.0: expected"),
    "half a prompt": (TEXT, text(prompt=[1] * 9 + [{}] * 200_000), 400, "prompt.9: expected"),
    "wrong inputs": (INFER, {"inputs": [0] * 500_000}, 400, "inputs.0: expected an object"),
    "wrong outputs": (INFER, {**tokens(1), "outputs": [0] * 60_000}, 400, "outputs.0"),
    "a long shape": (INFER, tokens(1, shape=[-1] * 60_000), 400, "inputs.0.shape"),
    "wrong content": (
        *(CHAT, text(messages=[{"role": "user", "content": [0] * 500_000}]), 400),
        "messages.0.content.0: expected a part",
    ),
    "wrong messages": (CHAT, text(messages=[0] * 500_000), 400, "messages.0: expected an object"),
    "many values": (TEXT, text(prompt="a", user={"a": [[]] * 100_000}), 400, "more than 65536"),
    "many bytes": (TEXT, text(prompt="a" * 3_000_000), 400, "3000000 tokens"),
    "many tokens": (TEXT, text(prompt=[1] * 1_000_000), 400, "1000000 tokens"),
    "a long name": (TEXT, text(prompt="a", **{"b" * 1_000_000: 1}), 400, "Unrecognized"),
    "a deep list": (TEXT, '{"model":"tiny","prompt":' + "[" * 1_000_000, 400, "more than 16 deep"),
    "a deep object": (TEXT, '{"a":' * 500_000, 400, "more than 16 deep"),
    "many logprobs": (
        *(TEXT, text(prompt="a", n=16, max_tokens=4096, logprobs=20, seed=1), 413),
        "at most 33,554,432",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_request_is_refused_with_its_number(
    server: Served, name: str, model: Artifact
) -> None:
    """A busy machine stops a process now and then: a server that stops itself does so each time."""
    longest = []
    while not longest or (min(longest) >= 1 and len(longest) < 3):
        longest.append(longest_wait(server, COSTLY[name]))
        eventually(server.idle)
    assert min(longest) < 1  # 7 s before; 0.1 where nothing else runs


def longest_wait(server: Served, request: tuple[str, Any, int, str]) -> float:
    """Return the seconds after which others are answered while a request is refused."""
    path, content, status, words = request
    body = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx2.Client() as client:
            while not waits or not ended.is_set():
                start = time.perf_counter()
                client.get(f"{server.url}/health/live", timeout=20)
                waits.append(time.perf_counter() - start)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        found = httpx2.post(f"{server.url}{path}", content=body, timeout=30)
    finally:
        ended.set()
        asking.join()
    assert found.status_code == status and words in found.text, found.text[:500]
    assert len(found.content) < 5_000
    return max(waits)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": ["a" * 1000] + ["b"] * 30_000}),
        json.dumps({"prompt": [{}] * 300_000}),
        json.dumps({"a": ["b"] * 60_000, "c": [{}] * 300_000}),
        '{"a":' * 200_000,
    ],
    ids=["texts", "objects", "both", "deep"],
)
def test_reading_takes_little_more_than_the_body(body: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((JsonError, ElementError)):
            reader = JsonReader(body.encode())
            for name in reader.fields():
                reader.numbers(()) if name == "prompt" else reader.value()
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body) + 10_000_000
    finally:
        tracemalloc.stop()


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=9)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | FLOATS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_values_are_read_as_json_has_them(value: Any, indent: int | None, ascii: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii)
    reader = JsonReader(body.encode("utf-8", "surrogatepass" if ascii else "replace"))
    found = reader.value()
    reader.end()
    if ascii:
        assert found == value and json.dumps(found) == json.dumps(value)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='[]{},:"\\0123456789-+.eE truefalsnu \n', max_size=40))
def test_what_is_not_json_is_an_error_and_nothing_else(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    for read in (lambda r: r.value(), lambda r: r.numbers(())):
        try:
            reader = JsonReader(text.encode())
            found = read(reader)
            reader.end()
        except (JsonError, ElementError):
            continue
        if isinstance(found, dict | list | str | int | float):
            assert found == expected
        else:
            assert found is None or np.array(expected).size == len(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | FLOATS, max_size=30), st.integers(1, 4))
def test_numbers_are_those_of_the_list(values: list[float], rows: int) -> None:
    nested = [values] * rows
    found = JsonReader(json.dumps(nested).encode()).numbers(())
    assert found.lengths == [rows, len(values)] and len(found) == rows * len(values)
    as_float = found.array(np.dtype(np.float64))
    assert as_float is not None
    np.testing.assert_array_equal(as_float, np.array(nested, np.float64).ravel())
    whole = found.array(np.dtype(np.int64))
    assert (whole is not None) == all(isinstance(v, int) for v in values)


@pytest.mark.parametrize(
    "spaces",
    [
        json_reader.AT_ONCE - 3,
        json_reader.AT_ONCE - 2,
        json_reader.AT_ONCE - 1,
        json_reader.AT_ONCE,
        5 * json_reader.AT_ONCE,
    ],
)
def test_any_spaces_stand_between_numbers(spaces: int) -> None:
    """More than are read at once behind a number were taken for a damaged one."""
    blank = " " * spaces
    for text in (f"[12{blank},3]", f"[12,{blank}3]", f"[12,3{blank}]", f"[1,{blank}2{blank},3]"):
        assert JsonReader(text.encode()).numbers(()).parts[0][0] == json.loads(text)[0]
        assert len(JsonReader(text.encode()).numbers(())) == len(json.loads(text))
    with pytest.raises(JsonError, match=r"damaged|comma is missing"):
        JsonReader(f"[12{blank}3]".encode()).numbers(())
    with pytest.raises(JsonError, match="damaged, or too long"):
        JsonReader(f"[{'1' * (spaces + json_reader.AT_ONCE)},2]".encode()).numbers(())


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint64", "bool"])
def test_an_answer_is_not_longer_than_was_said(dtype: str) -> None:
    kind = np.dtype(dtype)
    rng = np.random.default_rng(0)
    if kind.kind == "f":
        values = -np.exp(rng.normal(size=5000) * 15).astype(kind)
    else:
        values = rng.integers(0, 2, 5000).astype(kind)
        values[:100] = np.iinfo(kind).min if kind.kind in "iu" else True
    text = encoded({"a": [{"data": values, "b": None}], "c": [1] * 100, "d": [], "e": {}})
    assert json.loads(text)["a"][0]["data"] == values.tolist()
    assert len(text) < largest(5000, kind) + 500


def test_requests_share_a_budget() -> None:
    budget = Budget(100)
    one, two = budget.open(), budget.open()
    one.take(60, "it")
    with pytest.raises(ProtocolError, match="Try again later") as refused:
        two.take(60, "it")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    one.close()
    two.take(60, "it")
    with pytest.raises(ProtocolError, match="needs 120 bytes for it") as refused:
        two.take(60, "it")
    assert refused.value.status == 413
    two.close()
    assert budget.taken == 0


def test_nothing_of_the_budget_is_kept(server: Served, model: Artifact) -> None:
    with served(model, memory_mib=2) as small:
        body = json.dumps(text(prompt="a" * 600_000))
        for _ in range(5):
            found = httpx2.post(f"{small.url}{TEXT}", content=body)
            assert found.status_code == 413 and "2,097,152" in found.text
        found = httpx2.post(
            f"{small.url}{TEXT}", json=text(prompt="ab", max_tokens=5, temperature=0)
        )
        assert found.json()["choices"][0]["text"] == alone(model, b"ab", max_tokens=5)


SCORES = """<ir_version: 9, opset_import: ["": 20]>
g (int64[batch, seq] tokens) => (float[batch, 16] output) {
  x = Cast<to=1>(tokens) last = Constant<value_ints=[2]>() one = Constant<value_ints=[1]>()
  q = Unsqueeze(x, last) k = Unsqueeze(x, one) a = MatMul(q, k) s = Softmax(a)
  means = ReduceMean<keepdims=0>(s, one) first = Constant<value_ints=[16]>()
  zero = Constant<value_ints=[0]>() output = Slice(means, zero, first, one) }"""


def test_values_inside_a_graph_are_counted_before_a_call(
    server: Served, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of 160 kB compared 20,000 tokens with each other: 3.2 GB, answered by 1 kB."""
    memory = CallMemory.of_model(model.manifest, parser.parse_model(SCORES))
    monkeypatch.setattr(server.service, "memory", memory)
    called: list[int] = []
    monkeypatch.setattr(
        server.service.computing, "run", lambda feeds: called.append(1) or asyncio.sleep(0, {})
    )
    monkeypatch.setattr(inference, "answer", lambda *_: Response("computed"))
    body = {**tokens(20_000), "outputs": [{"name": "output", "parameters": {"binary_data": True}}]}
    found = httpx2.post(f"{server.url}{INFER}", json=body)
    needed = re.search(r"needs ([\d,]+) bytes for what the model computes", found.text)
    assert found.status_code == 413 and "536,870,912" in found.text and needed and not called
    assert int(needed[1].replace(",", "")) == pytest.approx(2 * 20_000**2 * 4, rel=0.01)
    body = {**tokens(5000), "outputs": body["outputs"]}
    assert httpx2.post(f"{server.url}{INFER}", json=body).text == "computed" and called


@pytest.mark.parametrize("length", [3, 1000, 1025, 5000])
def test_memory_between_two_lengths_is_not_less_than_it_is(model: Artifact, length: int) -> None:
    graph = parser.parse_model(SCORES)
    exact = 3 * Footprint(graph).at({"batch": 1, "seq": length})
    found = CallMemory.of_model(model.manifest, graph).bytes(
        {"tokens": np.ones((3, length), np.int64)}
    )
    assert 0.999 * exact <= found <= 1.1 * exact + 10_000


def test_outputs_are_as_before_in_every_form(server: Served, model: Artifact) -> None:
    want = model.run(np.ones((1, 300), np.int64))["output"]
    for outputs in (None, [{"name": "output"}]):
        found = httpx2.post(f"{server.url}{INFER}", json={**tokens(300), "outputs": outputs})
        (output,) = found.json()["outputs"]
        values = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_array_equal(values, want)


# Headers ------------------------------------------------------------------------------------------


def sent(server: Served, content: bytes, *, whole: bool = True) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(content)
        if whole:
            raw.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while part := raw.recv(2**16):
                found += part
        except ConnectionResetError:
            pass
        return found


LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"a" * 100_000 + b"\r\n", b"a: b\r\n" * 300, b"x: " + b"a" * 32_768 + b"\r\n"],
    ids=["long", "many", "a little longer"],
)
@pytest.mark.parametrize("before", [b"", LIVE + b"\r\n"], ids=["first", "second"])
def test_headers_have_a_limit_in_one_packet_too(
    server: Served, headers: bytes, before: bytes
) -> None:
    answers = sent(server, before + LIVE + headers + b"\r\n").split(b"HTTP/1.1 ")[1:]
    assert [a[:3] for a in answers] == [b"200"] * bool(before) + [b"400"]


def test_headers_within_the_limit_are_read_with_a_body_behind_them(server: Served) -> None:
    body = json.dumps(text(prompt="ab", max_tokens=1, user="u" * 50_000)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"x: " + b"a" * 30_000 + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert sent(server, head + body, whole=False).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("length", ["1" * 5000, "²", "-1", "1e3", "１"])
def test_a_length_in_a_header_is_a_number(server: Served, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length.encode("utf-8")}
    found = httpx2.post(f"{server.url}{INFER}", json=tokens(1), headers=headers)
    assert found.status_code == 400 and "Inference-Header-Content-Length is" in found.text


def chunked(path: str, body: bytes, size: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    content = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + content + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_a_body_in_chunks_is_read_whole(server: Served, size: int) -> None:
    body = json.dumps(text(prompt="ab", max_tokens=2, user="u" * 3_500)).encode()
    found = sent(server, chunked(TEXT, body, size), whole=False)
    assert found.startswith(b"HTTP/1.1 200") and b'"completion_tokens": 2' in found


def test_a_body_in_very_many_chunks_is_refused(server: Served) -> None:
    """Each costs as much as a large one: 600,000 took the loop's turns for seconds."""
    found = sent(server, chunked(TEXT, b" " * 40_000, 1), whole=False)
    assert b"more than 4096 chunks" in found


def trailers(*lines: bytes, before: bytes = b"") -> bytes:
    body = json.dumps(text(prompt="ab", max_tokens=1)).encode()
    whole = before + chunked(TEXT, body, 20)
    return whole.removesuffix(b"\r\n") + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def extended(extension: bytes, size: int) -> bytes:
    body = json.dumps(text(prompt="ab", max_tokens=1)).encode()
    head, end, _ = chunked(TEXT, body, size).partition(b"\r\n\r\n")
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = [b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts]
    return head + end + b"".join(chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (trailers(b"x: y"), b"200"),
        (trailers(b"x: " + b"a" * 30_000), b"200"),
        (extended(b";a=b", 5), b"200"),
        (extended(b";" + b"a" * 20_000, 60), b"200"),
        (trailers(b"x: " + b"a" * 33_000), b"400"),
        (trailers(b"x: " + b"a" * 200_000), b"400"),
        (trailers(*[b"a: b"] * 201), b"400"),
        (trailers(*[b"a: b"] * 60_000), b"400"),
        (extended(b";" + b"a" * 200_000, 60), b"400"),
        (extended(b";" + b"a" * 4000, 5), b"400"),
    ],
    ids=["short", "nearly", "small", "one", "long", "longer", "lines", "many", "wide", "often"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["one packet", "several"])
def test_trailers_and_extensions_of_chunks_have_the_limits_of_headers(
    server: Served, content: bytes, status: bytes, whole: bool
) -> None:
    head = content.index(b"\r\n\r\n") + 4
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        try:
            for part in [content] if whole else [content[:head], content[head:]]:
                raw.sendall(part)
                time.sleep(0 if whole else 0.02)
            assert raw.recv(2**16)[9:12] == status
        except ConnectionError:  # closed with the rest unread
            assert status == b"400"
    eventually(server.idle)


def test_one_connection_goes_on_in_a_turn_of_the_event_loop() -> None:
    done: list[str] = []

    async def run() -> None:
        turns = TurnQueue()

        def go_on(name: str, pieces: int) -> None:
            done.append(name)
            if pieces > 1:
                turns.add(lambda: go_on(name, pieces - 1))

        for name in "abc":
            turns.add(lambda name=name: go_on(name, 2))  # type: ignore[misc]
        while len(done) < 6:
            before = len(done)
            await asyncio.sleep(0)
            assert len(done) <= before + 1

    asyncio.run(run())
    assert done == [*"abcabc"]


def test_the_parser_is_given_a_part_of_a_packet_at_a_time(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60,000 trailers that are all there are read at once otherwise, before they are counted."""
    real, given = PieceReader.receive_data, []

    def receive_data(self: PieceReader, data: bytes) -> None:
        given.append(len(data))
        real(self, data)

    monkeypatch.setattr(PieceReader, "receive_data", receive_data)
    body = json.dumps(text(prompt="ab", max_tokens=1, user="u" * 60_000)).encode()
    assert sent(server, chunked(TEXT, body, 60_200), whole=False).startswith(b"HTTP/1.1 200")
    assert max(given) <= PART and sum(given) > 60_000
    given.clear()
    assert sent(server, trailers(*[b"a: b"] * 60_000), whole=False).startswith(b"HTTP/1.1 400")
    assert sum(given) < 2 * HEADER_BYTES + PART


def test_a_body_may_come_in_any_number_of_packets() -> None:
    """Packets are not chunks: a limit for those ended large bodies of a slow network."""
    reader, found = PieceReader(h11.SERVER, HEADER_BYTES, HEADERS), 0
    reader.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 40000\r\n\r\n")
    assert isinstance(reader.next_event(), h11.Request)
    for _ in range(40_000):
        reader.receive_data(b"a")
        reader.go_on()
        found += len(reader.next_event().data)
    assert found == 40_000


def test_a_body_that_goes_on_after_the_answer_is_not_waited_for(model: Artifact) -> None:
    """A byte now and then held a connection for ever, once its request had taken too long."""
    with served(model, request_seconds=1) as slow:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as raw:
            raw.sendall(head)
            assert raw.recv(2**16).startswith(b"HTTP/1.1 408")
            start = time.perf_counter()
            with pytest.raises(ConnectionError):
                while time.perf_counter() < start + 20:
                    raw.sendall(b" ")
                    time.sleep(0.05)


def test_a_request_that_has_its_answer_gets_no_other(model: Artifact) -> None:
    """Pieces over a limit that come behind an answer end the connection, without a second one."""
    with served(model, max_body=1_000, request_seconds=60) as small:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", small.port), timeout=10) as raw:
            raw.sendall(head.encode() + b"7d0\r\n" + b" " * 2000 + b"\r\n")
            answer = raw.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 413")
            try:
                raw.sendall((b"1;" + b"a" * 2_000 + b"\r\n \r\n") * pieces.AT_ONCE)
                while more := raw.recv(2**16):
                    answer += more
            except ConnectionError:
                pass
    assert answer.count(b"HTTP/1.1") == 1


def test_chunks_leave_the_loop_its_turns() -> None:
    reader = PieceReader(h11.SERVER, HEADER_BYTES, HEADERS)
    reader.receive_data(chunked(TEXT, b" " * 1000, 1))
    turns = []
    while not any(isinstance(event, h11.EndOfMessage) for event in turns):
        turns, rested = [], reader.rests
        reader.go_on()
        while (event := reader.next_event()) is not h11.NEED_DATA:
            turns.append(event)
            if isinstance(event, h11.EndOfMessage):
                break
        assert len(turns) <= AT_ONCE + 1 and (rested or isinstance(turns[0], h11.Request))


def test_long_answers_are_made_beside_the_event_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probabilities of 8,192 tokens stopped the loop for more than a second."""
    real, threads = Answer.complete, []

    def complete(self: Answer, *parts: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(self, *parts)

    monkeypatch.setattr(Answer, "complete", complete)
    fields = {"prompt": "ab", "max_tokens": 30, "logprobs": 20, "n": 2}
    found = httpx2.post(f"{server.url}{TEXT}", json=text(**fields)).json()
    assert [len(c["logprobs"]["top_logprobs"]) for c in found["choices"]] == [30, 30]
    assert [name.partition("_")[0] for name in threads] == ["desk"]


def test_the_event_loop_has_its_turn_soon(model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 large bodies that are read on a thread held /health/live up for 290 ms: 5 ms a turn."""
    before, found = sys.getswitchinterval(), []
    monkeypatch.setattr(Server, "run", lambda *_: found.append(sys.getswitchinterval()))
    limits = Limits()
    try:
        service = Service(model, LocalComputing(model, limits), "tiny", limits)
        serve(service, Address(port=0), lambda url: None)
    finally:
        sys.setswitchinterval(before)
    assert found == [pytest.approx(0.0005)]


# Connections --------------------------------------------------------------------------------------


def test_the_address_is_announced_when_it_is_answered(model: Artifact) -> None:
    bound = listen(Address(port=0))
    reached = []

    def announced() -> None:
        with socket.create_connection(bound.getsockname(), timeout=5):
            reached.append(True)

    limits = Limits(grace_seconds=0)
    service = Service(model, LocalComputing(model, limits), "tiny", limits)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=5)
    server = Server(service, Address(port=0), announced)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    eventually(lambda: server.started and reached)
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_connections_wait_where_no_file_can_be_opened(
    number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, however long it lasts; then they are taken."""
    monkeypatch.setattr(accepting, "PAUSE", 0.001)
    taken: list[asyncio.Protocol] = []

    def protocol() -> asyncio.Protocol:
        taken.append(asyncio.Protocol())
        return taken[-1]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        acceptor, real, left = Acceptor(listening, 8, protocol, []), loop.sock_accept, [60]

        async def accept(sock: socket.socket) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(number, os.strerror(number))
            return await real(sock)

        monkeypatch.setattr(loop, "sock_accept", accept)
        task = asyncio.create_task(acceptor.run())
        client = await asyncio.open_connection(*listening.getsockname())
        while not taken:
            await asyncio.sleep(0.001)
        client[1].close()
        task.cancel()
        listening.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [os.strerror(number)]


# Parking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1], ids=["state", "text"])
def test_a_text_is_answered_where_the_disk_is_full(
    after: int, model: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with served(model, park=tmp_path) as found:
        monkeypatch.setattr(os, "fsync", full)
        answer = httpx2.post(f"{found.url}{TEXT}", json=text(prompt="ab", max_tokens=9, park=True))
        assert answer.status_code == 200 and "parked" not in answer.json()
        monkeypatch.undo()
    sampled = answer.json()["choices"][0]["text"]
    assert answer.json()["usage"]["completion_tokens"] == 9 and sampled
    assert not list(tmp_path.iterdir())
