"""A step of a hybrid behind contexts of several lengths, whose caches it appends to or copies.

    python tools/bench_contexts.py ARTIFACT [--contexts 16,1024,8192,32768] [--json FILE]

Keys and values are drawn. Steps that append to them are timed in turns with steps that are given
copies, and so make caches of their own, as every step did before calls appended. Making the copies
that are given is not timed. Medians, in milliseconds, and the bytes of keys and values.
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

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """Times of a step, in milliseconds, behind a context.

    Attributes:
        context: tokens of it.
        mebibytes: of keys and values.
        appended: median of steps that append to caches.
        copied: of steps that copy them.
    """

    context: int
    mebibytes: float
    appended: float
    copied: float


def begun(artifact: Artifact, context: int) -> Arrays:
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
    """Time steps of both kinds, in turns."""
    state = begun(artifact, context)
    size = sum(v.nbytes for n, v in state.items() if artifact.states[n].growing_axis is not None)
    ids = {artifact.manifest.inputs[0].name: np.zeros((1, 1), np.int64)}
    feeds, _ = artifact.inputs.bind([ids], {})
    states: list[Arrays] = [state, state]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARMUP + REPEATS):
        for kind in range(2):
            given = {n: np.array(v) for n, v in states[1].items()} if kind else states[0]
            start = time.perf_counter()
            _, states[kind] = artifact.call(feeds, given, logits_to_keep=1)
            times[kind].append(1e3 * (time.perf_counter() - start))
    appended, copied = (statistics.median(one[WARMUP:]) for one in times)
    return Row(context, size / 2**20, appended, copied)


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
    print("context   MiB of keys and values   appended, ms   copied, ms")
    for row in rows:
        print(f"{row.context:7,} {row.mebibytes:24.1f} {row.appended:14.2f} {row.copied:12.2f}")
    measurement.write(given.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
