"""Runtimes by name: each runs the calls of models, and says why where it does not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes.cases import Arrays, decoded
from tests.support.browser import browser

PROGRAMS = Path(__file__).with_name("programs")
SECONDS = 120


@dataclass(frozen=True)
class Job:
    """A model and what it is called with; the calls are in files of their own.

    Attributes:
        model: an ONNX file.
        calls: made by ``cases.Call.to_json``.
    """

    model: Path
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """What a runtime made of a job: the outputs of each call, or why there are none."""

    outputs: list[Arrays] | None
    refused: str | None


def run(name: str, environment: Path, jobs: Sequence[Job], folder: Path) -> list[Result]:
    """Return the results of jobs in a runtime.

    Args:
        name: of the runtime.
        environment: made by ``tools/runtimes_environment``.
        jobs: to run one after the other.
        folder: an empty one.
    """
    files = []
    for i, job in enumerate(jobs):
        (folder / f"{i}.calls.json").write_text(json.dumps(job.calls))
        (folder / f"{i}.onnx").write_bytes(job.model.read_bytes())
        paths = {"model": f"{i}.onnx", "calls": f"{i}.calls.json", "result": f"{i}.result.json"}
        files.append({key: str(folder / path) for key, path in paths.items()})
    RUNTIMES[name](name, environment, files)
    return [_result(json.loads(Path(file["result"]).read_text())) for file in files]


def _result(found: dict[str, Any]) -> Result:
    if "error" in found:
        return Result(None, _reason(found["error"]))
    outputs = [{n: decoded(value) for n, value in call.items()} for call in found["outputs"]]
    return Result(outputs, None)


def _reason(text: str) -> str:
    """The last line of an error, where those of these runtimes say what is in the way."""
    lines = [line.strip(" -") for line in text.splitlines() if line.strip(" -")]
    return lines[-1] if lines else "no reason given"


Files = list[dict[str, str]]


def run_process(command: Sequence[str | Path], files: Sequence[Mapping[str, Any]]) -> None:
    """Run jobs in a process; one that ends it is refused, and another goes on with the rest.

    Args:
        command: is given a file of jobs, and writes what it finds to the ``result`` of each.
        files: the jobs.
    """
    left = list(files)
    while left:
        jobs = Path(left[0]["result"]).with_name("jobs.json")
        jobs.write_text(json.dumps(left))
        try:
            done = subprocess.run(
                [*map(str, command), str(jobs)], capture_output=True, text=True, timeout=SECONDS
            )
            ended = f"it ended the process by signal {-done.returncode}"
            reason = ended if done.returncode < 0 else done.stderr
        except subprocess.TimeoutExpired:
            reason = f"not done after {SECONDS} s"
        left = [file for file in files if not Path(file["result"]).exists()]
        if left:
            Path(left[0]["result"]).write_text(json.dumps({"error": reason}))
            left = left[1:]


def _python(runtime: str, environment: Path, files: Files) -> None:
    own = environment / "bin" / "python"
    python = own if runtime == "OpenVINO" else sys.executable
    run_process([python, PROGRAMS / "run.py", runtime], files)


def _node(runtime: str, environment: Path, files: Files) -> None:
    run_process(["node", PROGRAMS / "run.mjs", environment, runtime.split(",")[0]], files)


def _chromium(runtime: str, environment: Path, files: Files) -> None:
    places = {
        "packages": environment / "node_modules",
        "programs": PROGRAMS,
        "files": Path(files[0]["calls"]).parent,
    }
    with served(places) as address, browser() as page:
        page.set_script_timeout(SECONDS)
        page.get(f"{address}/programs/page.html")
        for file in files:
            model, calls = (f"/files/{Path(file[key]).name}" for key in ("model", "calls"))
            script = "run(arguments[0], arguments[1]).then(arguments[2])"
            Path(file["result"]).write_text(page.execute_async_script(script, model, calls))


class _Files(SimpleHTTPRequestHandler):
    """Files of several folders, each under its name."""

    def __init__(self, *arguments: Any, folders: dict[str, Path]) -> None:
        self._folders = folders
        super().__init__(*arguments)

    def translate_path(self, path: str) -> str:
        name, _, rest = path.partition("?")[0].lstrip("/").partition("/")
        return str(self._folders[name] / rest) if name in self._folders else ""

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def served(folders: dict[str, Path]) -> Iterator[str]:
    """Serve files of several folders, each under its name; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, folders=folders))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def need_node(environment: Path) -> None:
    """Skip a test where the environment was made without node."""
    if not (environment / "node_modules").is_dir():
        pytest.skip("needs node: apt-get install nodejs npm")


RUNTIMES: dict[str, Callable[[str, Path, Files], None]] = {
    "onnxruntime": _python,
    "onnx.reference": _python,
    "OpenVINO": _python,
    "onnxruntime-node": _node,
    "onnxruntime-web, node": _node,
    "onnxruntime-web, Chromium": _chromium,
}
