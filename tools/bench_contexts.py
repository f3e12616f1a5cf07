"""A step of a hybrid behind contexts of several lengths.

    python tools/bench_contexts.py ARTIFACT [--contexts 16,1024,8192,32768] [--json FILE]

Keys and values are drawn, and steps of one token append to them. Prints the median of a step in
milliseconds, and the bytes of keys and values that it reads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import measurement
import numpy as np

import linexport
from linexport.artifact import Artifact

REPEATS, WARMUP = 40, 4


@dataclass(frozen=True)
class Row:
    """A step behind a context.

    Attributes:
        context: tokens of it.
        mebibytes: of keys and values.
        milliseconds: of a step, median.
    """

    context: int
    mebibytes: float
    milliseconds: float


def begun(artifact: Artifact, context: int) -> dict[str, np.ndarray]:
    """Return states after so many tokens: drawn keys and values, and others at their beginning."""
    rng, found = np.random.default_rng(0), artifact.initial_state(1)
    for name, state in artifact.states.items():
        if state.growing_axis is not None:
            shape = list(found[name].shape)
            shape[state.growing_axis] = context
            drawn = found[name].dtype.kind == "f"
            values = rng.standard_normal(shape, np.float32) if drawn else np.ones(shape)
            found[name] = values.astype(found[name].dtype)
    return found


def measured(artifact: Artifact, context: int) -> Row:
    """Time steps that follow each other."""
    state, times = begun(artifact, context), []
    size = sum(v.nbytes for n, v in state.items() if artifact.states[n].growing_axis is not None)
    ids = {artifact.manifest.inputs[0].name: np.zeros((1, 1), np.int64)}
    feeds, _ = artifact.inputs.bind([ids], {})
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        _, state = artifact.call(feeds, state, logits_to_keep=1)
        times.append(1e3 * (time.perf_counter() - start))
    return Row(context, size / 2**20, statistics.median(times[WARMUP:]))


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("artifact", type=Path)
    options.add_argument("--contexts", default="16,1024,8192,32768")
    options.add_argument("--threads", type=int, default=2)
    measurement.add_option(options)
    given = options.parse_args()
    artifact = linexport.load(given.artifact, threads=given.threads)
    rows = [measured(artifact, int(context)) for context in given.contexts.split(",")]
    print("context   MiB of keys and values   a step, ms")
    for row in rows:
        print(f"{row.context:7,} {row.mebibytes:24.1f} {row.milliseconds:12.2f}")
    measurement.write(given.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
