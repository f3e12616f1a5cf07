"""Streams on a Ray cluster: two replicas beside one, and a replica killed in the midst of hundreds.

    tools/ray_environment DIR
    python tools/bench_ray.py --ray DIR [--dim 512] [--streams 500] [--json FILE]

Clusters of one and of two replicas answer the same requests in turns; each replica has one thread.
Beside the speed stands how many cores were busy, and with the replicas: where one replica leaves
none idle, a second cannot help. Then all streams are sent to two replicas, and one is killed
(SIGKILL) in the midst of them: every text must be the one ``generate`` writes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import bench_serve
import httpx2
import measurement

import linexport
from linexport import models

CLIENTS, TOKENS, ROUNDS = 16, 64, 3


@contextmanager
def cluster(ray: Path, artifact: Path, replicas: int, log: Path) -> Iterator[str]:
    """Start a cluster of its own, and end it; yields its URL."""
    arguments = [f"artifact={artifact}", "name=m", "slots=32", "queue=1024", "connections=1024"]
    arguments += [f"{end}_replicas={replicas}" for end in ("min", "max")]
    own = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    command = [ray / "bin" / "serve", "run", "linexport.serving.ray:app", *arguments]
    with log.open("w") as errors:
        driver = subprocess.Popen(command, env={**os.environ, **own}, stdout=errors, stderr=errors)
    try:
        while " is ready at http://" not in log.read_text():
            if driver.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield "http://127.0.0.1:8000"
    finally:
        driver.send_signal(signal.SIGINT)
        driver.wait()


def replicas() -> list[int]:
    """Return the processes of the models on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_text()
        except OSError:
            continue
        if command.startswith("ray::ServeReplica:") and ":Model" in command:
            found.append(int(entry.parent.name))
    return found


def busy_seconds() -> dict[str, float]:
    """Return the processor time since the start: of the machine, and of the replicas."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    stats = [Path(f"/proc/{process}/stat").read_text() for process in replicas()]
    own = [sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats]
    ticks = os.sysconf("SC_CLK_TCK")
    return {"cores_busy": (user + nice + system) / ticks, "with_replicas": sum(own) / ticks}


async def killed(url: str, texts: list[bench_serve.Text]) -> list[str]:
    """Read all texts, and kill a replica when a tenth of them has ended; return them."""
    ended = 0

    async def one(client: httpx2.AsyncClient, text: bench_serve.Text) -> str:
        nonlocal ended
        try:
            written, _ = await bench_serve.read(client, text)
        except httpx2.HTTPError as error:
            written = f"lost: {error!r}"
        ended += 1
        return written

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        tasks = [asyncio.create_task(one(client, text)) for text in texts]
        while ended < len(texts) // 10:
            await asyncio.sleep(0.05)
        os.kill(replicas()[0], signal.SIGKILL)
        return await asyncio.gather(*tasks)


def measured(url: str) -> dict[str, float]:
    """Return the speed of all clients together, and how busy the machine was."""
    before, begun = busy_seconds(), time.perf_counter()
    rounds = [asyncio.run(bench_serve.together(url, CLIENTS)) for _ in range(ROUNDS)]
    seconds, after = time.perf_counter() - begun, busy_seconds()
    used = {name: (after[name] - before[name]) / seconds for name in after}
    return {"tokens_per_second": median(r["tokens_per_second"] for r in rounds), **used}


def main() -> None:
    """Print both measurements; exit 1 where a text was wrong or lost."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ray", type=Path, required=True, help="environment with Ray")
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--streams", type=int, default=500)
    measurement.add_option(options)
    given = options.parse_args()
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, dim in {"large": given.dim, "small": 32}.items():
            config = {"dim": dim, "num_heads": max(2, dim // 64), "layers": bench_serve.LAYERS}
            models.save(models.build("language_model", config), folder / f"{name}.pt")
            linexport.convert(folder / f"{name}.pt", folder / name, bench=False)
        for _ in range(2):
            for count, found in runs.items():
                with cluster(given.ray, folder / "large", count, folder / "ray.log") as url:
                    asyncio.run(bench_serve.together(url, CLIENTS))
                    found.append(measured(url))
        texts = [bench_serve.Text(f"def f{i}(", 40, i, 0.8) for i in range(given.streams)]
        model = linexport.load(folder / "small", threads=1)
        expected = [bench_serve.alone(model, text) for text in texts]
        with cluster(given.ray, folder / "small", 2, folder / "ray.log") as url:
            begun = time.perf_counter()
            written = asyncio.run(killed(url, texts))
            seconds = time.perf_counter() - begun
    lost = sum(text.startswith("lost: ") for text in written)
    wrong = sum(w != e for w, e in zip(written, expected, strict=True)) - lost
    result: dict[str, Any] = {
        "runs": {f"{count} replicas": found for count, found in runs.items()},
        "kill": {"streams": len(texts), "wrong": wrong, "lost": lost, "seconds": round(seconds, 1)},
        "load": Path("/proc/loadavg").read_text().split()[:3],
    }
    print(json.dumps(result, indent=2))
    measurement.write(given.json, result)
    sys.exit(bool(wrong or lost))


if __name__ == "__main__":
    main()
