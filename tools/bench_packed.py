"""Prompts of many lengths in a pool: packed batches beside rows, target ort-cuda, on one provider.

    python tools/bench_packed.py [--prompts 16] [--dim 512] [--chunk 256] [--provider cpu]

Median milliseconds until all prompts are computed and each has one more token, and the calls of the
model that this took. Rounds of the two follow each other, so that both meet the same load of the
machine. ONNX Runtime before 1.32 runs packed batches on the CPU by standard operators.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import measurement
import numpy as np

import linexport
from linexport import models
from linexport.artifact import Artifact

LAYERS, LONGEST = 4, 200


def artifacts(dim: int, rule: str, threads: int, provider: str, place: Path) -> dict[str, Artifact]:
    """Convert a language model of four layers both ways."""
    config = {"dim": dim, "num_heads": dim // 64, "layers": LAYERS, "update_rule": rule}
    config |= {"normalize": rule == "linear"}
    models.save(models.build("language_model", config), place / "model.pt")
    opened = {}
    for name, packed in (("rows", False), ("packed", True)):
        options = {"target": "ort-cuda", "packed_batches": packed, "bench": False}
        linexport.convert(place / "model.pt", place / name, **options)
        opened[name] = linexport.load(place / name, threads=threads, provider=provider)
    return opened


def round_of(model: Artifact, prompts: list[np.ndarray], chunk: int) -> tuple[float, int]:
    """Seconds that prompts and a token after each took, and calls of the model."""
    calls, call = 0, model.call

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return call(*arguments)  # type: ignore[arg-type]

    model.call = counted  # type: ignore[method-assign, assignment]
    with model.pool(slots=len(prompts), chunk=chunk) as pool:
        sessions = [pool.open() for _ in prompts]
        start = time.perf_counter()
        for session, prompt in zip(sessions, prompts, strict=True):
            session.push(prompt)
            session.push(np.zeros((1, 1), np.int64))
        while any(session.queued for session in sessions):
            pool.advance()
        took = time.perf_counter() - start
    model.call = call  # type: ignore[method-assign]
    return took, calls


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rule", default="gated_delta")
    parser.add_argument("--provider", default="cpu")
    measurement.add_option(parser)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    lengths = random.integers(1, LONGEST, given.prompts)
    prompts = [random.integers(256, size=(1, n)) for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        both = artifacts(given.dim, given.rule, given.threads, given.provider, Path(folder))
        times: dict[str, list[float]] = {name: [] for name in both}
        calls = {name: round_of(model, prompts, given.chunk)[1] for name, model in both.items()}
        for _ in range(given.rounds):
            for name, model in both.items():
                times[name].append(1e3 * round_of(model, prompts, given.chunk)[0])
    print(
        f"{given.rule}, {given.prompts} prompts of 1 to {LONGEST - 1} tokens, {sum(lengths)} in all"
    )
    found = {name: round(statistics.median(values), 1) for name, values in times.items()}
    for name, median in found.items():
        print(f"{name:<8} {median:8.1f} ms  {calls[name]:4d} calls")
    options = {key: value for key, value in vars(given).items() if key != "json"}
    measurement.write(given.json, {**options, "median_ms": found, "calls": calls})


if __name__ == "__main__":
    main()
