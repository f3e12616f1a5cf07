"""Sessions of a pool that decode together, beside one session alone, and beside taking turns.

Then the first token after a long prompt, computed and with its prefix known.

    python tools/bench_pool.py [--sessions 16] [--dim 512] [--threads 0] [--seconds 20]

Total tokens a second, and the time between two tokens of a session, its median and its 99th
percentile. One round of each after another, so that all meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measurement
import numpy as np

import linexport
from linexport import models
from linexport.artifact import Artifact

LAYERS = 4
TOKEN = np.zeros((1, 1), np.int64)


def model_of(dim: int, place: Path, threads: int) -> Artifact:
    """Convert a language model of four layers."""
    config = {"dim": dim, "num_heads": dim // 64, "layers": LAYERS}
    models.save(models.build("language_model", config), place / "model.pt")
    linexport.convert(place / "model.pt", place / "out", bench=False)
    return linexport.load(place / "out", threads=threads)


def contestants(model: Artifact, sessions: int) -> dict[str, Callable[[], object]]:
    """Return the rounds: a token for every sequence."""
    alone, turns = model.stream(), [model.stream() for _ in range(sessions)]
    pool = model.pool(slots=sessions)
    members = [pool.open() for _ in range(sessions)]

    def together() -> None:
        for session in members:
            session.push(TOKEN)
        pool.advance()

    return {
        "alone": lambda: alone.step(TOKEN),
        "pool": together,
        "turns": lambda: [stream.step(TOKEN) for stream in turns],
    }


def measure(rounds: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each round, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for call in rounds.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in rounds.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def first_tokens(model: Artifact, length: int, rounds: int = 5) -> dict[str, list[float]]:
    """Milliseconds from a prompt to the logits after it, computed and from a known prefix."""
    times: dict[str, list[float]] = {"computed": [], "known": []}
    for seed in range(rounds):
        prompt = np.random.default_rng(seed).integers(256, size=(1, length + 1))
        pool = model.pool(slots=1, cache=model.prefix_cache(budget_mb=100))
        for name in times:
            with pool.open() as session:
                start = time.perf_counter()
                session.push(prompt)
                while session.queued:
                    pool.advance()
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Print and write the numbers."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--sessions", type=int, default=16)
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--threads", type=int, default=0)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--prefix", type=int, default=4096, help="tokens of a known prefix")
    measurement.add_option(options)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = model_of(given.dim, Path(place), given.threads)
        times = measure(contestants(model, given.sessions), given.seconds)
        first = first_tokens(model, given.prefix)
    tokens = {"alone": 1, "pool": given.sessions, "turns": given.sessions}
    result = {
        name: {
            "tokens_per_second": round(1e3 * tokens[name] / float(np.median(values)), 1),
            "median_ms": round(float(np.median(values)), 3),
            "p99_ms": round(float(np.percentile(values, 99)), 3),
        }
        for name, values in times.items()
    }
    for name, row in result.items():
        print(f"{name:6} {row}")
    rate = result["pool"]["tokens_per_second"] / result["alone"]["tokens_per_second"]
    wait = result["pool"]["p99_ms"] / result["alone"]["p99_ms"]
    print(f"tokens/s {rate:.2f} of one session's; p99 between tokens {wait:.2f} of one session's")
    known = {name: round(float(np.median(values)), 3) for name, values in first.items()}
    print(f"first token after {given.prefix} tokens, ms: {known}")
    load = Path("/proc/loadavg").read_text().split()[:3]
    record = {"sessions": given.sessions, "dim": given.dim, "load": load, **result}
    measurement.write(given.json, {**record, "prefix": given.prefix, "first_token_ms": known})


if __name__ == "__main__":
    main()
