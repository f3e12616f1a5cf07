"""``linexport plan`` beside this machine: memory of an opened artifact, and the time of a step.

    python tools/bench_plan.py ARTIFACT ... --context 1024,8192

Each artifact runs in a process of its own, on one thread, whose largest resident memory is read
after a prompt in pieces of 64 tokens and forty steps. The fastest step counts, since others use the
machine, too. Its bandwidth is the highest at which one thread reads a large array, looked at around
each artifact. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PIECE, STEPS = 64, 40
GIB = 2**30


def bandwidth() -> float:
    """Return the bytes a second at which one thread reads memory."""
    values, times = np.ones(GIB // 4, np.float32), []
    for _ in range(10):
        for read in (values.sum, values.max):
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
    return values.nbytes / min(times)


def resident(key: str) -> int:
    """Return bytes of this process by a key of /proc/self/status, such as VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(artifact: str, context: int) -> dict[str, float]:
    """Return bytes before and after opening, at most, and seconds of a step at the context."""
    import linexport
    from linexport.artifact.text.language_interface import language_interface

    before = resident("VmRSS")
    model = linexport.load(artifact, threads=1)
    opened = resident("VmRSS")
    generator, stream = np.random.default_rng(0), model.stream()
    name = language_interface(model.manifest).tokens
    for start in range(0, context, PIECE):
        ids = generator.integers(0, 250, (1, min(PIECE, context - start)))
        stream.step({name: ids}, logits_to_keep=1)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        stream.step({name: generator.integers(0, 250, (1, 1))})
        times.append(time.perf_counter() - begin)
    return {"before": before, "opened": opened, "most": resident("VmHWM"), "step": min(times)}


def compare(artifact: str, context: int, rate: float) -> dict[str, object]:
    """Return the figures of a plan beside those that were measured in another process."""
    from linexport import planning

    found = planning.plan(artifact, memory=1000, bandwidth=rate / 1e9, context=context)
    row = next(row for row in found.rows if row.artifact)
    command = [sys.executable, __file__, "--measure", artifact, "--context", str(context)]
    made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "artifact": artifact,
        "context": context,
        "bandwidth": rate,
        "planned_memory": row.memory_bytes,
        "measured_memory": made["most"],
        "memory_ratio": made["most"] / row.memory_bytes,
        "bound": 1 / row.tokens_per_second,
        "step": made["step"],
        "step_ratio": made["step"] * row.tokens_per_second,
        **made,
    }


def main() -> None:
    """Compare every artifact at every context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--context", default="1024")
    parser.add_argument("--measure", action="store_true", help="one artifact in this process")
    given = parser.parse_args()
    contexts = [int(part) for part in given.context.split(",")]
    if given.measure:
        print(json.dumps(measure(given.artifacts[0], contexts[0])))
        return
    rate = bandwidth()
    for artifact in given.artifacts:
        for context in contexts:
            rate = max(rate, bandwidth())
            print(json.dumps(compare(artifact, context, rate)), flush=True)


if __name__ == "__main__":
    main()
