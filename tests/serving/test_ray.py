"""A Ray cluster of two replicas: kill -9 changes no text, and no sequence."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.http as triton
from pages import blocks

import linexport
from tests.support import ROOT, environments
from tests.support.serving import alone

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

PAGE = ROOT / "docs" / "ray.md"
STARTING, ANSWERING = 120.0, 120.0
STREAMS, TOKENS = 24, 120


@dataclass(frozen=True)
class Cluster:
    """A cluster that serves.

    Attributes:
        url: of the gateway.
        driver: process that everything descends from.
        completion: the page's command that asks for a text.
        artifact: that is served.
    """

    url: str
    driver: subprocess.Popen[bytes]
    completion: str
    artifact: Path
    config: Path
    environment: dict[str, str]

    def replicas(self) -> list[int]:
        """Processes of the models."""
        return self.processes("ray::ServeReplica:", ":Model")

    def processes(self, begin: str, part: str = "") -> list[int]:
        """Processes of the cluster with such a command."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text()
                if command.startswith(begin) and part in command:
                    found.append(int(entry.name))
            except OSError:
                continue
        return [pid for pid in found if self._descends(pid)]

    def deploy(self, replicas: int) -> None:
        """Change the number of replicas, as the page's ``serve deploy`` does."""
        text = self.config.read_text()
        for old in (1, 2):
            text = text.replace(f"min_replicas: {old}", f"min_replicas: {replicas}")
        text = re.sub(r"max_replicas: \d+", f"max_replicas: {max(replicas, 1)}", text)
        changed = self.config.with_name("changed.yaml")
        changed.write_text(text)
        done = subprocess.run(
            ["serve", "deploy", str(changed)],
            env={**self.environment, "RAY_AUTH_MODE": "token"},  # that of the cluster started here
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _descends(self, pid: int) -> bool:
        while pid > 1 and pid != self.driver.pid:
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            pid = next(int(line.split()[1]) for line in status if line.startswith("PPid:"))
        return pid == self.driver.pid


def wait(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def environment() -> Path:
    """Ray's environment."""
    return environments.made("ray")


@pytest.fixture(scope="module")
def cluster(
    environment: Path,
    program: Callable[..., Any],
    converted: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """What the page of the documentation starts."""
    work = tmp_path_factory.mktemp("ray")
    artifact = converted("language_model")
    text = PAGE.read_text(encoding="utf-8").replace("test: not run", "tests")
    found = [b for b in blocks.tested_blocks(text) if b.language == "sh"]
    packaging, serving, completion = (c for b in found[-2:] for c in blocks.commands(b.text))
    arguments = shlex.split(packaging.replace("package artifact", f"package {artifact}"))
    done = program(*arguments[1:], "--name", "artifact", cwd=work)
    assert done.code == 0, done.err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    config = work / "deployment" / "serve.yaml"
    config.write_text(config.read_text().replace("8000", port))
    own = {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_ADDRESS": "local",
    }
    url = f"http://127.0.0.1:{port}"
    with (work / "serve.log").open("w") as log:
        driver = subprocess.Popen(
            shlex.split(serving), cwd=work, env={**os.environ, **own}, stdout=log, stderr=log
        )
    command = completion.replace("8000", port)
    running = Cluster(url, driver, command, artifact, config, {**os.environ, **own})
    try:
        wait(lambda: driver.poll() is not None or answers(url), STARTING)
        assert driver.poll() is None, (work / "serve.log").read_text()[-3000:]
        yield running
    finally:
        driver.send_signal(signal.SIGINT)
        try:
            driver.wait(60)
        except subprocess.TimeoutExpired:
            driver.kill()


def answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health/ready").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture(autouse=True)
def two_replicas(cluster: Cluster) -> None:
    wait(lambda: len(cluster.replicas()) == 2, STARTING)


def test_the_page_of_the_documentation(cluster: Cluster) -> None:
    done = subprocess.run(cluster.completion, shell=True, capture_output=True, text=True)
    expected = alone(linexport.load(cluster.artifact), b"import ", max_tokens=20)
    assert json.loads(done.stdout)["choices"][0]["text"] == expected


def body(number: int) -> dict[str, Any]:
    """A request for one text of several: sampled, with probabilities, with stop strings."""
    return {
        "model": "artifact",
        "prompt": f"def f{number}(",
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "n": 1 + number % 2,
        "logprobs": 1 if number % 3 == 0 else None,
        "stop": ["never in this text"] if number % 4 == 0 else None,
    }


@dataclass
class Read:
    """What the client of a stream has got: by number of the text, its pieces and tokens."""

    texts: dict[int, str]
    tokens: dict[int, list[str]]
    ended: int = 0
    error: str = ""


async def read(client: httpx2.AsyncClient, number: int, found: Read) -> None:
    try:
        await read_stream(client, number, found)
    except httpx2.TransportError as error:
        found.error = repr(error)


async def read_stream(client: httpx2.AsyncClient, number: int, found: Read) -> None:
    async with client.stream("POST", "/v1/completions", json=body(number)) as answer:
        if answer.status_code != 200:
            found.error = f"{answer.status_code}: {await answer.aread()!r}"
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                found.error = str(event)
                continue
            [choice] = event["choices"]
            index = choice["index"]
            found.texts[index] = found.texts.get(index, "") + choice["text"]
            if choice["logprobs"]:
                found.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            found.ended += choice["finish_reason"] == "length"


async def under_load(cluster: Cluster, disturb: Callable[[], None]) -> list[Read]:
    """Read all streams, and do something when each has begun."""
    found = [Read({}, {}) for _ in range(STREAMS)]
    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=cluster.url, timeout=ANSWERING, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number, one in enumerate(found):
            tasks.create_task(read(client, number, one))
        while sum(len(one.texts.get(0, "")) > 3 for one in found) < STREAMS // 2:
            await asyncio.sleep(0.02)
        disturb()
    return found


def test_a_replica_is_killed_in_mid_stream_and_every_text_is_that_of_one_process(
    cluster: Cluster,
) -> None:
    killed = cluster.replicas()[0]
    found = asyncio.run(under_load(cluster, lambda: os.kill(killed, signal.SIGKILL)))
    model = linexport.load(cluster.artifact, threads=1)
    for number, one in enumerate(found):
        check(model, number, one)
    assert killed not in cluster.replicas()


def check(model: linexport.Artifact, number: int, found: Read) -> None:
    """Every text of a stream is the one of a single process."""
    asked = body(number)
    assert (found.error, found.ended) == ("", asked["n"])
    for index, text in found.texts.items():
        expected = alone(
            model,
            asked["prompt"].encode(),
            max_tokens=TOKENS,
            temperature=0.8,
            seed=number + index,
        )
        assert text == expected
        if asked["logprobs"]:
            assert len(found.tokens[index]) == TOKENS


def test_a_replica_is_taken_away_in_mid_stream(cluster: Cluster) -> None:
    found = asyncio.run(under_load(cluster, lambda: cluster.deploy(1)))
    model = linexport.load(cluster.artifact, threads=1)
    for number, one in enumerate(found):
        check(model, number, one)
    wait(lambda: len(cluster.replicas()) == 1, STARTING)
    cluster.deploy(2)


@pytest.mark.parametrize(
    "killed",
    [
        ("ray::ServeReplica:", ":Gateway"),
        pytest.param(("ray::ProxyActor", ""), marks=pytest.mark.slow),
    ],
    ids=["gateway", "proxy"],
)
def test_what_holds_the_connections_is_killed(cluster: Cluster, killed: tuple[str, str]) -> None:
    """A text is whole, or its client is told: no text ends early as if it were whole.

    Ray's proxy answers 500 where nothing was sent yet, and breaks the connection otherwise.
    """
    victims = cluster.processes(*killed)
    assert victims
    found = asyncio.run(
        under_load(cluster, lambda: [os.kill(pid, signal.SIGKILL) for pid in victims])
    )
    model, told = linexport.load(cluster.artifact, threads=1), 0
    for number, one in enumerate(found):
        if one.error:
            told += 1
        else:
            check(model, number, one)
    assert told
    wait(lambda: answers(cluster.url), STARTING)
    done = subprocess.run(cluster.completion, shell=True, capture_output=True, text=True)
    expected = alone(model, b"import ", max_tokens=20)
    assert json.loads(done.stdout)["choices"][0]["text"] == expected
    metrics = httpx2.get(f"{cluster.url}/metrics").text.splitlines()
    assert "linexport_sessions 0.0" in metrics


def test_a_sequence_outlives_its_replica(cluster: Cluster) -> None:
    client = triton.InferenceServerClient(cluster.url.removeprefix("http://"))

    def infer(values: np.ndarray, **sequence: Any) -> np.ndarray:
        tensor = triton.InferInput("tokens", list(values.shape), "INT64")
        tensor.set_data_from_numpy(values)
        found: np.ndarray = client.infer("artifact", [tensor], **sequence).as_numpy("output")
        return found

    tokens = np.array([list(b"import numpy as np")])
    pieces = [infer(tokens[:, :6], sequence_id=7, sequence_start=True)]
    for pid in cluster.replicas():  # whichever has computed it
        os.kill(pid, signal.SIGKILL)
    pieces.append(infer(tokens[:, 6:11], sequence_id=7))
    pieces.append(infer(tokens[:, 11:], sequence_id=7, sequence_end=True))
    whole = linexport.load(cluster.artifact, threads=1).run(tokens)["output"]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-4)
    with pytest.raises(Exception, match="not open"):
        infer(tokens, sequence_id=7)


def test_what_a_server_refuses_is_refused_here(cluster: Cluster) -> None:
    with httpx2.Client(base_url=cluster.url) as client:
        asked = {"model": "artifact", "prompt": "a", "max_tokens": 3}
        for change, status in (
            ({"prompt": [999]}, 400),
            ({"max_tokens": 10**6}, 400),
            ({"model": "other"}, 404),
            ({"n": 17}, 400),
        ):
            answer = client.post("/v1/completions", json={**asked, **change})
            assert (answer.status_code, "message" in answer.json()["error"]) == (status, True)
        assert client.get("/v1/models", headers={"Host": "elsewhere.invalid"}).status_code == 421
        assert client.post("/v1/completions", json=asked).status_code == 200
        metrics = client.get("/metrics").text.splitlines()
        assert "linexport_sessions 0.0" in metrics
