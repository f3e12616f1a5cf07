"""Texts of a model repository, by a Triton server: one sequence for each prompt, all at once."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linexport.artifact.text.language_interface import language_interface
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.package.destination import BatchPrompts, Packaging, WrittenTexts
from linexport.system.json_object import JsonObject

SERVER = "tritonserver"
START_SECONDS, ANSWER_SECONDS = 180, 300


def write_texts(job: Packaging, prompts: BatchPrompts) -> WrittenTexts:
    """See ``Destination.write_texts``; greedy, by the logits that the server answers with.

    Raises:
        UsageError: the model streams its answers, which HTTP does not.
        EnvironmentProblemError: the server is not installed, or does not start with the model.
    """
    if job.options.get("decoupled") == "true":
        raise UsageError(
            "--prove asks the server by HTTP, which has no streams of answers. Leave out decoupled."
        )
    program = shutil.which(SERVER)
    if program is None:
        raise EnvironmentProblemError(
            f"Found no {SERVER} on PATH, in which --prove runs the package. Run the command where "
            "the server is installed, as in the container nvcr.io/nvidia/tritonserver."
        )
    with _running(program, job.folder) as address:
        ask = partial(_ask, time.monotonic() + ANSWER_SECONDS)
        version = ask(f"{address}/v2")["version"]
        infer = partial(ask, f"{address}/v2/models/{job.name}/infer")
        write = partial(_write, infer, job, prompts.tokens)
        with ThreadPoolExecutor(len(prompts.rows)) as pool:
            texts = list(pool.map(write, range(1, len(prompts.rows) + 1), prompts.rows))
    return WrittenTexts(f"Triton Inference Server {version}", texts)


def _write(
    infer: Callable[[JsonObject], Any],
    job: Packaging,
    tokens: int,
    sequence: int,
    prompt: np.ndarray,
) -> list[int]:
    """Return the text of one sequence."""
    names, text = language_interface(job.manifest), list[int]()
    fed: list[int] = prompt.tolist()
    for step in range(tokens):
        given = [{"name": names.tokens, "shape": [1, len(fed)], "datatype": "INT64", "data": fed}]
        if names.mask is not None:
            given.append({**given[0], "name": names.mask, "data": [1] * len(fed)})
        begins, ends = step == 0, step == tokens - 1
        flags = {"sequence_id": sequence, "sequence_start": begins, "sequence_end": ends}
        request = {"inputs": given, "parameters": flags, "outputs": [{"name": names.logits}]}
        [output] = infer(request)["outputs"]
        fed = [int(np.argmax(output["data"][-names.vocabulary :]))]
        text += fed
    return text


def _ask(limit: float, url: str, content: Mapping[str, object] | None = None) -> Any:
    """Return the answer to a request, which has to come before a point in time."""
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        left = max(0.1, limit - time.monotonic())
        with urllib.request.urlopen(request, timeout=left) as answer:
            return json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:1000]
        raise EnvironmentProblemError(f"{SERVER} refuses a request: {text}") from None
    except OSError as error:
        raise EnvironmentProblemError(f"{SERVER} does not answer: {error}") from None


@contextmanager
def _running(program: str, repository: Path) -> Iterator[str]:
    """Run a server of a repository; yields its address."""
    with socket.socket() as one, socket.socket() as other:
        for place in (one, other):
            place.bind(("127.0.0.1", 0))
        http, grpc = one.getsockname()[1], other.getsockname()[1]
    command = [
        *(program, f"--model-repository={repository.absolute()}", "--allow-metrics=false"),
        *("--http-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}"),
        # Shared memory has names on a machine, on which another server may run.
        f"--backend-config=python,shm-region-prefix-name=linexport-{http}",
    ]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{http}"
            _wait(server, address, log)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, log: Any) -> None:
    """Wait until all models are loaded."""
    limit = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"{address}/v2/health/ready", timeout=5):
                return
        except OSError:  # not yet, or not at all
            time.sleep(0.2)
    log.seek(0)
    said = log.read().decode(errors="replace").strip()[-1500:]
    raise EnvironmentProblemError(f"{SERVER} does not start with the package:\n{said}")
