"""The program ``linexport serve`` as a process, and the commands of its page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from pages import blocks

import linexport
from tests.support import ROOT
from tests.support.serving import alone, eventually

PAGE = ROOT / "docs" / "serving.md"
PROMPT = "import "


@pytest.fixture(scope="module")
def folder(converted: Callable[..., Path]) -> Path:
    return converted("language_model")


@contextmanager
def process(start: Callable[..., Any], *arguments: object) -> Iterator[tuple[Any, str]]:
    """The program, once it takes requests, and its URL."""
    running = start("serve", *arguments, "--threads", 1)
    try:
        line = running.stderr.readline()
        assert " at http://" in line, line + running.stderr.read()
        url = line.split()[-1]
        eventually(lambda: _ready(url))
        yield running, url
    finally:
        running.kill()
        running.communicate()


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health/ready").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.services
def test_the_page_of_the_documentation(
    start: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    text = PAGE.read_text(encoding="utf-8").replace("test: not run, tests", "tests")
    found = [b for b in blocks.tested_blocks(text) if "8000" in b.text]
    assert [b.language for b in found] == ["sh", "python", "python"]
    with process(start, folder, "--name", "artifact", "--port", 0) as (_, url):
        port = url.rpartition(":")[2]
        outputs = []
        for block in found:
            code = block.text.replace(":8000", f":{port}")
            if block.language == "sh":
                command: Any = blocks.commands(code)[0]
            else:
                command = [sys.executable, "-c", code]
            done = subprocess.run(
                command, shell=block.language == "sh", capture_output=True, text=True, cwd=tmp_path
            )
            assert done.returncode == 0, done.stderr
            outputs.append(done.stdout)
    expected = alone(linexport.load(folder), PROMPT.encode(), max_tokens=20)
    assert json.loads(outputs[0])["choices"][0]["text"] == expected
    assert outputs[1]
    assert outputs[2] == "True\n"


@pytest.mark.services
def test_sigterm_lets_a_text_finish(start: Callable[..., Any], folder: Path) -> None:
    with process(start, folder, "--port", 0, "--grace-seconds", 120) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model=folder.name, prompt=PROMPT, max_tokens=1500, temperature=0, stream=True
        )
        text = next(stream).choices[0].text
        running.send_signal(signal.SIGTERM)
        text += "".join(event.choices[0].text for event in stream)
        assert running.wait(150) == 0
        log = running.stderr.read()
    assert text == alone(linexport.load(folder), PROMPT.encode(), max_tokens=1500)
    assert all(json.loads(line) for line in log.splitlines())
    assert "Traceback" not in log


@pytest.mark.services
def test_what_is_not_finished_is_parked_and_goes_on_in_the_next_process(
    start: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_tokens": 3000, "temperature": 0.8, "seed": 5}
    options = ("--port", 0, "--park", tmp_path / "parked", "--grace-seconds", 0, "--name", "tiny")
    with process(start, folder, *options) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="tiny", prompt=PROMPT, stream=True, **settings)
        text = next(stream).choices[0].text
        running.send_signal(signal.SIGTERM)
        events = list(stream)
        assert running.wait(150) == 0
    assert events[-1].choices[0].finish_reason == "parked"
    text += "".join(event.choices[0].text for event in events)
    name = events[-1].parked
    with process(start, folder, *options) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        rest = client.completions.create(model="tiny", prompt=None, extra_body={"resume": name})
    assert rest.choices[0].finish_reason == "length"
    assert rest.usage.completion_tokens == 3000
    expected = alone(linexport.load(folder), PROMPT.encode(), **settings)
    assert text + rest.choices[0].text == expected
    assert 0 < len(text) < len(expected)


@pytest.mark.parametrize(
    ("options", "environment", "code", "words"),
    [
        (["--host", "192.0.2.1"], {}, 5, "Cannot listen on 192.0.2.1"),
        (["--host", "no.such.name.invalid"], {}, 5, "Cannot listen on no.such.name"),
        (["--slots", "0"], {}, 2, "slots"),
        (["--token-file", "nowhere"], {}, 2, "nowhere cannot be read as a token"),
        ([], {"LINEXPORT_TOKEN": "short"}, 2, "LINEXPORT_TOKEN has no usable token"),
        (["--park", "/dev/null/x"], {}, 2, "Cannot park in /dev/null/x"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(
    cli: Callable[..., Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environment: dict[str, str],
    code: int,
    words: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    done = cli("serve", folder, *options)
    assert done.code == code and words in done.err and "Traceback" not in done.err


def test_a_missing_library_is_named_with_its_extra(
    cli: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("linexport.serving.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = cli("serve", folder)
    assert (done.code, "pip install '.[serve]'" in done.err) == (5, True)
