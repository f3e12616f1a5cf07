"""run.cpp of a prepared language model, with ONNX Runtime in the place of an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

import linexport
from linexport import targets
from linexport.artifact.text.native_tokenizer import described
from linexport.graph.dims import DimRange
from linexport.targets.trt import prepared
from tests.support import native_text

pytestmark = pytest.mark.skipif(
    native_text.COMPILER is None, reason="no C++ compiler, PCRE2 or utf8proc"
)
ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests/support/cpp/engine_of_onnxruntime"
PROMPT = "Ein Text — naïve, 日本: "
MOST = 8
"""Tokens of a call: the prompt is longer."""

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def program(
    converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """The compiled program, in a folder of what it reads; the artifact."""
    artifact, folder = converted("language_model"), tmp_path_factory.mktemp("program")
    manifest = linexport.load(artifact).manifest
    dims = {n: DimRange(1, 1, 1 if d.batch else MOST, d.batch) for n, d in manifest.dims.items()}
    tensors = manifest.inputs, manifest.outputs, manifest.states
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    given = targets.Converted(artifact / "model.onnx", dims, *tensors, None, "output", b"")
    for name, text in prepared._text_programs(given).items():
        (folder / name).write_text(text)
    (folder / "linexport_text.bin").write_bytes(described(folder, 256))
    (folder / "linexport_engine.h").write_text((ENGINE / "linexport_engine.h").read_text())
    native_text.compiled(folder / "run.cpp", folder / "run", ROOT / "examples/streaming")
    return SimpleNamespace(folder=folder, artifact=artifact)


def environment(**more: str) -> dict[str, str]:
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    return {**os.environ, "ORT_LIBRARY": str(library), **more}


def run(
    program: SimpleNamespace, *options: str, said: str = "", **more: str
) -> subprocess.CompletedProcess[bytes]:
    command = ["./run", str(program.artifact), *options]
    return subprocess.run(
        command,
        input=said.encode(),
        capture_output=True,
        cwd=program.folder,
        env=environment(**more),
        timeout=60,
    )


def expected(program: SimpleNamespace, prompt: str, tokens: int) -> bytes:
    model = linexport.load(program.artifact, threads=1)
    return bytes(model.generate(prompt.encode(), max_tokens=tokens))


def test_a_text_is_that_of_linexport(program: SimpleNamespace) -> None:
    done = run(program, "--prompt", PROMPT, "--tokens", "40")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(program, PROMPT, 40) + b"\n"
    sizes = [int(line.split()[-1]) for line in done.stderr.splitlines()]
    length = len(PROMPT.encode())
    assert sizes == [*[MOST] * (length // MOST), length % MOST, *[1] * 39]


def test_token_ids_are_taken(program: SimpleNamespace) -> None:
    ids = " ".join(map(str, PROMPT.encode()))
    assert (
        run(program, "--ids", ids, "--tokens", "9").stdout == expected(program, PROMPT, 9) + b"\n"
    )
    for wrong, message in (
        ("1 x", b"takes token ids"),
        ("256", b"vocabulary of 256"),
        ("", b"no token"),
    ):
        done = run(program, "--ids", wrong)
        assert done.returncode == 1 and message in done.stderr


def test_a_stop_string_ends_a_text(program: SimpleNamespace) -> None:
    whole = expected(program, PROMPT, 30)
    stop = whole[10:12].decode("latin-1")
    if not stop.isascii() or "\0" in stop:
        pytest.skip("the model writes no text there")
    done = run(program, "--prompt", PROMPT, "--tokens", "30", "--stop", stop)
    assert done.stdout == whole[: whole.find(stop.encode())] + b"\n"


def test_samples_follow_their_seed(program: SimpleNamespace) -> None:
    options = ("--prompt", PROMPT, "--tokens", "30", "--temperature", "1.5", "--seed")
    first, again, other = (run(program, *options, seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_conversation_goes_on_with_its_states(program: SimpleNamespace) -> None:
    """Each answer is that of the whole conversation so far."""
    done = run(program, "--chat", "--tokens", "6", said="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    first = "<user>one</><assistant>"
    answer = expected(program, first, 6)
    second = first.encode() + answer + b"</><user>two</><assistant>"
    model = linexport.load(program.artifact, threads=1)
    assert done.stdout == answer + b"\n" + bytes(model.generate(second, max_tokens=6)) + b"\n"


def test_a_context_ends_a_text(program: SimpleNamespace) -> None:
    length = len(PROMPT.encode())
    done = run(program, "--prompt", PROMPT, "--tokens", "30", CONTEXT=str(length + 4))
    assert done.stdout == expected(program, PROMPT, 5) + b"\n"
    done = run(program, "--prompt", PROMPT, CONTEXT=str(length - 1))
    assert done.returncode == 1 and f"has {length} tokens".encode() in done.stderr


@pytest.mark.parametrize(
    "options",
    [(), ("--prompt",), ("--prompt", "a", "--chat"), ("--tokens", "4"), ("--tokens", "x", "--chat"),
     ("--top-p", "0", "--chat"), ("--more", "1", "--chat"), ("--min-p", "nan", "--chat")],
)  # fmt: skip
def test_wrong_options_say_what_is_right(
    options: tuple[str, ...], program: SimpleNamespace
) -> None:
    done = run(program, *options)
    assert done.returncode == 2 and b"usage: run ENGINE" in done.stderr


def test_the_program_names_the_file_that_it_lacks(program: SimpleNamespace) -> None:
    done = subprocess.run(
        ["./run", str(program.artifact), "--chat"],
        input=b"",
        capture_output=True,
        cwd=program.folder.parent,
        executable=program.folder / "run",
        env=environment(),
    )
    assert done.returncode == 1 and b"linexport_text.bin is not there" in done.stderr


@pytest.fixture
def server(program: SimpleNamespace) -> Iterator[int]:
    command = ["./run", str(program.artifact), "--serve", "0", "--tokens", "12"]
    with subprocess.Popen(
        command, cwd=program.folder, env=environment(), stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        yield int(line.rsplit(":", 1)[1])
        process.kill()


def asked(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 30) as to:
        to.sendall(request)
        found = b""
        while part := to.recv(4096):
            found += part
    return found


def posted(prompt: bytes, head: bytes = b"") -> bytes:
    length = f"Content-Length: {len(prompt)}\r\n".encode()
    return b"POST / HTTP/1.1\r\nHost: a\r\n" + head + length + b"\r\n" + prompt


def test_requests_are_answered_one_after_another(program: SimpleNamespace, server: int) -> None:
    for prompt in (PROMPT, "another", PROMPT):
        head, text = asked(server, posted(prompt.encode())).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 OK") and text == expected(program, prompt, 12)


@pytest.mark.parametrize(
    "request_",
    [b"GET / HTTP/1.1\r\n\r\n", posted(b""), b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
     b"x" * 40_000, posted(b"a", b"Expect: 100-continue\r\n")],
)  # fmt: skip
def test_no_request_stops_the_server(
    request_: bytes, program: SimpleNamespace, server: int
) -> None:
    assert b"400 Bad Request" in asked(server, request_)
    socket.create_connection(("127.0.0.1", server)).close()  # goes away at once
    with socket.create_connection(("127.0.0.1", server)) as gone:
        gone.sendall(posted(PROMPT.encode()))
        time.sleep(0.05)
    assert asked(server, posted(b"another")).endswith(expected(program, "another", 12))
