"""A Qwen3.5 with int4 weights beside llama.cpp's Q4_0 at the same widths, in turns in one run.

    python -m venv DIR && DIR/bin/pip install xllamacpp gguf
    python tools/bench_llama.py --llama DIR/bin/python [--width 1024] [--threads 2] [--json FILE]

Both have random weights. A turn is a prompt of 512 tokens and 40 tokens after it; llama.cpp's times
are those that its server states. Its threads wait for each other by spinning: on a machine that
others use they are many times slower, and the comparison says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measurement
import numpy as np
from bench_weights import LENGTH, PAUSE, Converted, save_model, sized

MODEL_TYPE = "qwen3_5_text"
TOKENS = 40
ROUNDS = 6
STORED = ("int4", "int8", "float32")


class Llama:
    """llama.cpp in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.bytes = int(self._line())

    def turn(self) -> tuple[float, float]:
        """Milliseconds of a prompt, and of each token after it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{LENGTH} {TOKENS}\n")
        self.process.stdin.flush()
        prompt, token = map(float, self._line().split())
        return prompt, token

    def _line(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line
        raise SystemExit("llama.cpp ended; what it said is above.")


@contextmanager
def llama(python: Path, config: Path, file: Path, threads: int) -> Iterator[Llama]:
    """Start llama.cpp with random weights, and end it."""
    script = Path(__file__).parent / "llama_weights.py"
    command = [python, script, file, "--config", config, "--threads", str(threads)]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Llama(process)
        assert process.stdin is not None
        process.stdin.close()


def own_turn(run: Any) -> tuple[float, float]:
    """Milliseconds of a prompt, and of each token after it, each with its choice by argmax."""
    start = time.perf_counter()
    logits, run.state = run.read(run.tokens, run.empty)
    logits[0, -1].argmax()
    middle = time.perf_counter()
    for _ in range(TOKENS):
        run.step()[0, -1].argmax()
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - middle) / TOKENS


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return bytes of the files, and milliseconds by who computes them."""
    sizes = sized(MODEL_TYPE, given.width, given.layers, given.vocabulary)
    folder = work / "model"
    save_model(sizes, MODEL_TYPE, folder)
    tokens = np.random.default_rng(0).integers(3, given.vocabulary, size=(1, LENGTH))
    own = Converted(folder, work, tokens, given.threads)
    config, file = folder / "config.json", work / "model.gguf"
    with llama(given.llama, config, file, given.threads) as peer:
        turns = {name: (lambda n=name: own_turn(own.runs[n])) for name in STORED}
        turns["llama.cpp Q4_0"] = peer.turn
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for _ in range(ROUNDS):
            for name, turn in turns.items():
                time.sleep(PAUSE)
                times[name].append(turn())
        sizes_of = {name: own.bytes(name) for name in STORED} | {"llama.cpp Q4_0": peer.bytes}
    medians = {
        name: [round(statistics.median(part), 3) for part in zip(*rows[1:], strict=True)]
        for name, rows in times.items()
    }
    return {
        name: {"bytes": sizes_of[name], "prefill": prompt, "step": token}
        for name, (prompt, token) in medians.items()
    }


def main() -> None:
    """Measure, and print the times of all."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--llama", type=Path, required=True, help="a Python with xllamacpp")
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--vocabulary", type=int, default=32000)
    options.add_argument("--threads", type=int, default=2)
    measurement.add_option(options)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(given, Path(work))
    for name, row in found.items():
        print(name, json.dumps(row), flush=True)
    sizes = {n: getattr(given, n) for n in ("width", "layers", "vocabulary", "threads")}
    load = round(os.getloadavg()[0], 1)
    measurement.write(given.json, {**sizes, "load": load, "runs": found})


if __name__ == "__main__":
    main()
