"""A public model's shape in 4 bits beside llama.cpp and ik_llama.cpp, in turns in one run.

    python -m venv DIR && DIR/bin/pip install xllamacpp gguf
    python tools/bench_llama.py --shape qwen3.5-0.8b [--layers 4] --llama DIR/bin/python
                                [--ik PATH/llama-bench] [--lengths 64,512,4096] [--json FILE]

Weights are random, in all of 4 bits, and the tied table of 8 in ours, of 6.6 (Q6_K) in theirs. A
turn is a prompt, of which the last token's logits are computed, and 40 tokens after it, each the
most probable one. ``xllamacpp`` is llama.cpp with its server, which states its times; of
ik_llama.cpp ``llama-bench`` is built from source, and opens the file in every turn. Their threads
wait for each other by spinning: on a machine that others use they are many times slower, and say
nothing. Runs are added to those in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import measurement
import numpy as np
import real_shapes
from bench_int4 import TOKENS, Turn, in_turns, llama, own_turn
from bench_weights import Converted

SHAPES = ("qwen3.5-0.8b",)
"""Shapes that ``llama_weights.py`` writes for llama.cpp."""


def ik_turn(program: Path, model: Path, threads: int, length: int) -> tuple[float, float]:
    """Time ik_llama.cpp by its ``llama-bench``: a prompt, and tokens after such a prompt."""
    options = ["-m", model, "-t", threads, "-r", 1, "-o", "json", "-fa", 1]
    counts = ["-p", length, "-n", 0, "-gp", f"{length},{TOKENS}"]
    command = [program, *options, *counts]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ik_llama.cpp ended with {done.stderr[-2000:]}")
    speeds = {bool(row["n_gen"]): row["avg_ts"] for row in json.loads(done.stdout)}
    return 1e3 * length / speeds[False], 1e3 / speeds[True]


def measure(given: argparse.Namespace, work: Path) -> dict[str, object]:
    """Return bytes of the files, and milliseconds by who computes them."""
    shape = real_shapes.chosen(given)
    assert shape is not None
    folder, lengths = work / "model", [int(n) for n in given.lengths.split(",")]
    shape.save(folder)
    tokens = np.random.default_rng(0).integers(3, shape.vocabulary, size=(1, max(lengths)))
    own = Converted(folder, work, tokens, given.threads, ("int4",), last=True)
    model, settings = work / "model.gguf", (given.threads, max(lengths))
    with llama(given.llama, folder / "config.json", model, *settings) as (answer, size):
        turns: dict[str, Turn] = {
            "linexport int4": partial(own_turn, own.runs["int4"]),
            "llama.cpp Q4_0": answer,
        }
        if given.ik is not None:
            turns["ik_llama.cpp Q4_0"] = partial(ik_turn, given.ik, model, given.threads)
        found = in_turns(turns, lengths, given.rounds)
    sizes = dict.fromkeys(turns, size) | {"linexport int4": own.bytes("int4")}
    times = {
        name: {
            "bytes": sizes[name],
            "lengths": {
                str(length): {"prompt": round(prompt, 2), "step": round(token, 2)}
                for length, (prompt, token) in row.items()
            },
        }
        for name, row in found.items()
    }
    load = round(os.getloadavg()[0], 1)
    return {"shape": str(shape), "threads": given.threads, "load": load, "times": times}


def main() -> None:
    """Measure, and print the times of all."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    real_shapes.add_options(options, SHAPES)
    options.add_argument("--layers", type=int, help="the first of the shape; all by default")
    options.add_argument("--llama", type=Path, required=True, help="a Python with xllamacpp")
    options.add_argument("--ik", type=Path, help="llama-bench of ik_llama.cpp")
    options.add_argument("--lengths", default="64,512")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    measurement.add_option(options)
    options.set_defaults(shape=SHAPES[0])
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(given, Path(work))
    print(json.dumps(found, indent=1))
    if given.json is not None:
        before = measurement.read(given.json)["runs"] if given.json.exists() else []
        kept = [run for run in before if run["shape"] != found["shape"]]
        measurement.write(given.json, {"runs": [*kept, found]})


if __name__ == "__main__":
    main()
