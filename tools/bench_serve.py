"""Load on ``linexport serve``: sixteen clients beside one, and thousands that are not all polite.

    python tools/bench_serve.py [--dim 512] [--requests 2000] [--only requests] [--json FILE]
    python tools/bench_serve.py --shape qwen3.5-0.8b [--layers 4]
    python tools/bench_serve.py --only costly --requests 100000       a soak: about an hour

The program runs as processes of its own. In turns, one client and sixteen ask a server with 16
slots for texts, and sixteen ask one with a single slot, which answers one request at a time. Then
requests arrive at times drawn from a seed: whole texts, streams, clients that leave in mid-text or
before it, and bodies that are no request. Every text must be the one ``generate`` writes alone, and
afterwards no slot may be taken.

``costly``: a tenth of the requests, then all with one in ten more among them that is small and
would cost much (``COSTLY``), from another process. All of these are refused, no text changes,
memory does not grow, and the 99th percentile of the time between two tokens of the others, and of
``/health/live``, is printed beside that of the run without them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import measurement
import numpy as np
import real_shapes

import linexport
from linexport import models

LAYERS, TOKENS, CLIENTS, ROUNDS = 4, 64, 16, 9
DISTINCT, LONGEST, RATE = 100, 40, 30.0
"""Different texts of the long run, tokens of the longest, and arrivals a second: what two cores
take on with the clients."""

SMALL = 32
"""Width of the model of the long run."""

LONG = 1_000_000
"""Bytes of a body that would cost much, or a few more."""

FULL_ANSWER = 4_000
"""Tokens whose logits of 256 bytes are more JSON than a server sends."""


def tensor(**more: Any) -> dict[str, Any]:
    """Return a call of the model of the long run."""
    own = {"name": "tokens", "shape": [1, FULL_ANSWER], "datatype": "INT64"}
    return {"inputs": [{**own, "data": [1] * FULL_ANSWER, **more}]}


INFER, TEXT, CHAT = "/v2/models/m/infer", "/v1/completions", "/v1/chat/completions"
COSTLY: dict[str, tuple[str, Any]] = {
    "a wide text among numbers": (INFER, tensor(data=["a" * LONG] + ["b"] * FULL_ANSWER)),
    "an output eight times": (INFER, {**tensor(), "outputs": [{"name": "output"}] * 8}),
    "a long answer": (INFER, tensor(shape=[1, 8 * FULL_ANSWER], data=[1] * (8 * FULL_ANSWER))),
    "wrong prompts": (TEXT, {"model": "m", "prompt": [{}] * (LONG // 3)}),
    "wrong inputs": (INFER, {"inputs": [0] * (LONG // 2)}),
    "wrong content": (
        CHAT,
        {"model": "m", "messages": [{"role": "user", "content": [0] * (LONG // 2)}]},
    ),
    "many bytes": (TEXT, {"model": "m", "prompt": "a" * LONG}),
    "many tokens": (TEXT, {"model": "m", "prompt": [1] * (LONG // 2)}),
    "deep": (TEXT, '{"model": "m", "prompt": ' + "[" * LONG),
}
"""Requests that are small, and were gigabytes or seconds: path and body."""

COSTLY_BODIES = {
    name: (path, body.encode() if isinstance(body, str) else json.dumps(body).encode())
    for name, (path, body) in COSTLY.items()
}

CHUNKED = "very many chunks"
"""A kind that costs much as well: a body in chunks of a byte each."""

CHUNKED_BODY = (
    f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    + 20_000 * b"1\r\n \r\n"
)

BAD = (b"", b"{", b"[]", b'{"model": "m", "prompt": 3}', b'{"model": "m", "prompt": [-1]}', b"\xff")


@dataclass(frozen=True)
class Text:
    """A text that is asked for."""

    prompt: str
    tokens: int
    seed: int
    temperature: float

    def body(self, stream: bool) -> dict[str, Any]:
        """Return the request."""
        return {
            "model": "m",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "stream": stream,
        }


@dataclass
class Server:
    """A process that serves."""

    pid: int
    url: str

    def metric(self, name: str) -> float:
        """Return a number of /metrics."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def megabytes(self) -> float:
        """Return the memory that is resident."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

    @contextmanager
    def health(self) -> Iterator[list[float]]:
        """Yield a list that in the end has the seconds of every answer of /health/live."""
        host, port = self.url.removeprefix("http://").split(":")
        script = Path(__file__).with_name("health_times.py")
        found: list[float] = []
        with tempfile.TemporaryFile("w+") as lines:
            process = subprocess.Popen([sys.executable, str(script), host, port], stdout=lines)
            try:
                yield found
            finally:
                ended = process.poll()
                process.terminate()
                process.wait()
                lines.seek(0)
                found += map(float, lines.read().split())
        if ended is not None:
            raise SystemExit(f"/health/live ended: {ended}")


@contextmanager
def serve(artifact: Path, log: Path, *options: object) -> Iterator[Server]:
    """Start the program, and end it."""
    command = [sys.executable, "-m", "linexport", "serve", artifact, "--name", "m", "--port", 0]
    command += [*options, "--cache-mb", 64]
    with log.open("w") as errors:
        process = subprocess.Popen([str(part) for part in command], stderr=errors, text=True)
    try:
        while " at http://" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        url = log.read_text().split()[2]
        while True:
            try:
                httpx2.get(f"{url}/health/ready")
                break
            except httpx2.TransportError:
                time.sleep(0.1)
        yield Server(process.pid, url)
    finally:
        process.terminate()
        process.wait()


async def read(
    client: httpx2.AsyncClient, text: Text, least: int | None = None, **more: Any
) -> tuple[str, list[float]]:
    """Read a stream, to its end or for ``least`` pieces; return the text and the time of each.

    ``more`` are further fields of the request.
    """
    written, times = "", [time.perf_counter()]
    asked = {**text.body(True), **more}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                if choice["finish_reason"] is None:
                    times.append(time.perf_counter())
                written += choice["text"]
            if least is not None and len(times) > least:
                break
    return written, times


async def together(url: str, clients: int, **more: Any) -> dict[str, float]:
    """Let so many clients read a text each at the same time; ``more`` as of ``read``."""
    texts = [Text(f"def f{i}(", TOKENS, i, 0.0) for i in range(clients)]
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        begun = time.perf_counter()
        found = await asyncio.gather(*(read(client, text, **more) for text in texts))
        seconds = time.perf_counter() - begun
    gaps = np.concatenate([np.diff(times[1:]) for _, times in found])
    first = [times[1] - times[0] for _, times in found]
    return {
        "tokens_per_second": clients * TOKENS / seconds,
        "median_gap_ms": 1e3 * float(np.median(gaps)),
        "p99_gap_ms": 1e3 * float(np.percentile(gaps, 99)),
        "first_token_ms": 1e3 * float(np.median(first)),
    }


def throughput(artifact: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Measure in turns; return medians."""
    found: dict[str, list[dict[str, float]]] = {}
    many = serve(artifact, folder / "many.log", "--slots", CLIENTS)
    with many as pooled, serve(artifact, folder / "one.log", "--slots", 1) as single:
        cases = {
            "one client": (pooled.url, 1),
            f"{CLIENTS} clients": (pooled.url, CLIENTS),
            f"{CLIENTS} clients, one at a time": (single.url, CLIENTS),
        }
        for _ in range(ROUNDS + 1):
            for name, (url, clients) in cases.items():
                found.setdefault(name, []).append(asyncio.run(together(url, clients)))
    return {
        name: {key: float(np.median([r[key] for r in runs[1:]])) for key in runs[0]}
        for name, runs in found.items()
    }


@dataclass
class Soak:
    """Requests at recorded times, and what came of them."""

    server: Server
    expected: dict[Text, str]
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    async def run(self, arrivals: list[tuple[float, str, Text]]) -> None:
        """Send every request at its time."""
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(
            base_url=self.server.url, timeout=600, limits=limits
        ) as client:
            begun, tasks = time.perf_counter(), []
            for number, (at, kind, text) in enumerate(arrivals):
                await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
                tasks.append(asyncio.create_task(self._one(client, kind, text)))
                if number % (len(arrivals) // 8 or 1) == 0:
                    self.memory.append(round(self.server.megabytes(), 1))
            await asyncio.gather(*tasks)

    def add(self, counts: Counter[str], wrong: list[str]) -> None:
        """Add what came of other requests."""
        self.counts += counts
        self.wrong += wrong

    async def _one(self, client: httpx2.AsyncClient, kind: str, text: Text) -> None:
        for _ in range(1000):
            try:
                outcome = await self._try(client, kind, text)
            except httpx2.HTTPError as error:
                outcome = f"{kind}: {type(error).__name__}"
                self.wrong.append(outcome)
            if outcome != "429":
                break
            self.counts["told to wait"] += 1
            await asyncio.sleep(1)
        self.counts[outcome] += 1

    async def _try(self, client: httpx2.AsyncClient, kind: str, text: Text) -> str:
        if kind == "malformed":
            body = BAD[text.seed % len(BAD)]
            answer = await client.post("/v1/completions", content=body)
            return self._judged(kind, answer.status_code in (400, 404), answer.text)
        if kind == CHUNKED:
            found = await self._raw(CHUNKED_BODY)
            return self._judged(kind, found[9:12] in (b"400", b"408", b""), found.decode())
        if kind in COSTLY_BODIES:
            path, content = COSTLY_BODIES[kind]
            answer = await client.post(path, content=content)
            if answer.status_code == 429:
                return "429"
            return self._judged(kind, answer.status_code in (400, 404, 413), answer.text)
        if kind == "disconnect":
            host, port = self.server.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            content = json.dumps(text.body(True)).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + content[: text.seed % len(content) + 1])
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.transport.abort()
            return kind
        if kind == "text":
            answer = await client.post("/v1/completions", json=text.body(False))
            if answer.status_code == 429:
                return "429"
            choices = answer.json().get("choices", [{}])
            return self._judged(kind, choices[0].get("text") == self.expected[text], answer.text)
        try:
            written, times = await read(client, text, 3 if kind == "cancel" else None)
        except httpx2.HTTPStatusError as error:
            if error.response.status_code == 429:
                return "429"
            raise
        self.gaps += np.diff(times[1:]).tolist()
        expected = self.expected[text]
        right = expected.startswith(written) if kind == "cancel" else written == expected
        return self._judged(kind, right, written)

    async def _raw(self, content: bytes) -> bytes:
        """Return what is answered before the connection ends; nothing where it was reset."""
        host, port = self.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(content)
            await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    def _judged(self, kind: str, right: bool, found: str) -> str:
        if not right:
            self.wrong.append(f"{kind}: {found[:200]}")
        return kind


def send(server: Server, arrivals: list[tuple[float, str, Text]]) -> tuple[Counter[str], list[str]]:
    """Send requests that have no text to compare, and return what came of them.

    In a process of its own: what is measured of the others is not what this client computes.
    """
    run = Soak(server, {})
    asyncio.run(run.run(arrivals))
    return run.counts, run.wrong


def soak(
    artifact: Path, folder: Path, requests: int, rate: float, seed: int, costly: bool = False
) -> dict[str, Any]:
    """Send requests of all kinds, ``costly`` ones among them; return counts, memory and times."""
    draw = random.Random(seed)
    texts = [
        Text("x " * draw.randint(1, 150), draw.randint(1, LONGEST), i, draw.choice((0.0, 0.8)))
        for i in range(DISTINCT)
    ]
    model = linexport.load(artifact, threads=1)
    expected = {text: alone(model, text) for text in texts}
    kinds, weights = ("text", "stream", "cancel", "disconnect", "malformed"), (4, 3, 1, 1, 1)
    at, arrivals = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate)
        arrivals.append((at, draw.choices(kinds, weights)[0], draw.choice(texts)))
    more = random.Random(seed + 1)
    times = sorted(more.uniform(0, at) for _ in range(requests // 10 if costly else 0))
    attacks = [(t, more.choice([*COSTLY, CHUNKED]), texts[0]) for t in times]
    with (
        serve(artifact, folder / "soak.log", "--slots", CLIENTS) as server,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other,
    ):
        run = Soak(server, expected)
        other.submit(abs, 0).result()  # it has begun
        begun = time.perf_counter()
        with server.health() as live:
            attacked = other.submit(send, server, attacks)
            asyncio.run(run.run(arrivals))
            run.add(*attacked.result())
        seconds = time.perf_counter() - begun
        for _ in range(100):
            left = server.metric("linexport_sessions") + server.metric("linexport_queue")
            if not left:
                break
            time.sleep(0.1)
        run.memory.append(round(server.megabytes(), 1))
        generated = server.metric("linexport_generated_tokens_total")
    return {
        "requests": len(arrivals) + len(attacks),
        "p99_gap_ms": _p99(run.gaps),
        "p99_live_ms": _p99(live),
        "longest_live_ms": round(1e3 * max(live), 1),
        "seconds": round(seconds, 1),
        "generated_tokens": int(generated),
        "answered": dict(run.counts),
        "wrong_or_lost": run.wrong[:20],
        "slots_left_taken": int(left),
        "server_mib": run.memory,
    }


def _p99(seconds: list[float]) -> float:
    return round(1e3 * float(np.percentile(seconds, 99)), 2)


def alone(model: linexport.Artifact, text: Text) -> str:
    """Return the text that ``generate`` writes."""
    ids = model.generate(
        text.prompt.encode(), max_tokens=text.tokens, temperature=text.temperature, seed=text.seed
    )
    return bytes(ids).decode("utf-8", "replace")


def main() -> None:
    """Print both measurements; exit 1 where a text was wrong or a slot was left."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dim", type=int, default=512)
    real_shapes.add_options(options)
    options.add_argument("--layers", type=int, help="with --shape: so many of its layers")
    options.add_argument("--requests", type=int, default=2000)
    options.add_argument("--rate", type=float, default=RATE, help="arrivals a second")
    options.add_argument("--seed", type=int, default=0, help="of the arrivals")
    options.add_argument("--only", choices=("clients", "requests", "costly"))
    measurement.add_option(options)
    given = options.parse_args()
    shape = real_shapes.chosen(given)
    result: dict[str, Any] = {"dim": given.dim, "tokens": TOKENS}
    if shape is not None:
        result = {"shape": str(shape), "tokens": TOKENS}
        given.only = "clients"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if given.only not in ("requests", "costly"):
            made = artifact(folder, given.dim) if shape is None else shaped(folder, shape)
            times = throughput(made, folder)
            for name, numbers in times.items():
                print(name, {key: round(value, 2) for key, value in numbers.items()})
            result["times"] = times
        if given.only == "costly":
            model = artifact(folder, SMALL)
            for name, count in (("plain", given.requests // 10), ("soak", given.requests)):
                costly = name == "soak"
                result[name] = soak(model, folder, count, given.rate, given.seed, costly)
                print(name, json.dumps(result[name], indent=2))
        elif given.only != "clients":
            found = soak(artifact(folder, SMALL), folder, given.requests, given.rate, given.seed)
            print(json.dumps(found, indent=2))
            result["soak"] = found
    result["load"] = Path("/proc/loadavg").read_text().split()[:3]
    print("load average", *result["load"])
    measurement.write(given.json, result)
    long_run = result.get("soak", {})
    sys.exit(bool(long_run.get("wrong_or_lost") or long_run.get("slots_left_taken")))


def artifact(folder: Path, dim: int) -> Path:
    """Convert a model with random weights."""
    source, place = folder / f"{dim}.pt", folder / str(dim)
    config = {"dim": dim, "num_heads": max(2, dim // 64), "layers": LAYERS}
    models.save(models.build("language_model", config), source)
    linexport.convert(source, place, bench=False)
    return place


def shaped(folder: Path, shape: real_shapes.Chosen) -> Path:
    """Convert a model of a public shape with random weights."""
    source, place = folder / "model", folder / "shaped"
    shape.save(source)
    real_shapes.save_tokenizer(shape.vocabulary, source)
    linexport.convert(source, place, bench=False)
    return place


if __name__ == "__main__":
    main()
