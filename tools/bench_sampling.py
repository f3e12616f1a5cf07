"""Time to choose one token from the logits of a large vocabulary, by the options that models ship.

    python tools/bench_sampling.py [--vocabulary 248320] [--json FILE]

Processor time of one core, median of 60 draws, for three kinds of logits: standard normal times 3,
nearly equal, and one token far above the others.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import measurement
import numpy as np

from linexport.artifact.text.sampling import Sampling

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.05},
)
DRAWS = 60


def main() -> None:
    """Print a line for each kind of logits and each set of options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=248_320)
    measurement.add_option(parser)
    arguments = parser.parse_args()
    noise = np.random.default_rng(0).standard_normal(arguments.vocabulary)
    peaked = 2 * noise
    peaked[7] = 30.0
    rows = []
    for kind, logits in (("normal", 3 * noise), ("equal", 0.01 * noise), ("peaked", peaked)):
        for options in OPTIONS:
            took = _median(Sampling(**options), logits.astype(np.float32))
            rows.append({"logits": kind, **options, "ms": round(took, 3)})
            print(f"{kind:7} {took:7.3f} ms  {options}")
    measurement.write(arguments.json, rows)


def _median(sampling: Sampling, logits: np.ndarray) -> float:
    choose, times = sampling.chooser(range(2000)), []
    for _ in range(DRAWS):
        start = time.process_time()
        choose(logits)
        times.append(1e3 * (time.process_time() - start))
    return float(np.median(times))


if __name__ == "__main__":
    main()
