"""Tokens checked several in a call: what a call of k tokens costs, and what a draft gains.

    python tools/bench_draft.py [--dim 512] [--tokens 200] [--threads 0] [--json FILE]

The model has random weights, and its texts soon repeat themselves: so much is accepted there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import measurement
import numpy as np
from bench_pool import model_of

import linexport
from linexport.artifact import Artifact

LENGTHS = (1, 2, 4, 8, 9)


def calls(model: Artifact, rounds: int = 40) -> dict[int, float]:
    """Median milliseconds of a call of so many tokens, interleaved."""
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    stream = model.stream()
    for _ in range(rounds):
        for length in LENGTHS:
            start = time.perf_counter()
            stream.step(np.zeros((1, length), np.int64))
            times[length].append(1e3 * (time.perf_counter() - start))
    return {length: round(float(np.median(values)), 3) for length, values in times.items()}


def texts(model: Artifact, tokens: int, rounds: int = 5) -> dict[str, float | int | bool]:
    """Median seconds with and without prompt look-up, and what was accepted."""
    times: dict[str, list[float]] = {"plain": [], "ngram": []}
    draft, equal = linexport.NGramDraft(), True
    for seed in range(rounds):
        prompt = np.random.default_rng(seed).integers(256, size=20)
        written = {}
        for name, used in (("plain", None), ("ngram", draft)):
            start = time.perf_counter()
            written[name] = list(model.generate(prompt, max_tokens=tokens, draft=used))
            times[name].append(time.perf_counter() - start)
        equal &= written["plain"] == written["ngram"]
    found = {name: round(float(np.median(values)), 4) for name, values in times.items()}
    counts = {"proposed": draft.proposed, "accepted": draft.accepted, "calls": draft.calls}
    return {**found, **counts, "equal": equal}


def main() -> None:
    """Print and write the numbers."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--threads", type=int, default=0)
    measurement.add_option(options)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = model_of(given.dim, Path(place), given.threads)
        result = {"call_ms": calls(model), "text": texts(model, given.tokens)}
    print(result)
    measurement.write(given.json, result)


if __name__ == "__main__":
    main()
