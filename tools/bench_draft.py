"""Exact speculative decoding: what a call of k tokens costs, and what two drafts gain.

    python tools/bench_draft.py [--dim 256] [--steps 120] [--tokens 128] [--json FILE]

A byte-level model of six layers and its draft of one, 64 wide, are trained for some steps on the
standard library's source text. Texts go on from beginnings that neither has seen: without a draft,
with prompt look-up, with the small artifact, in turns. Every text must be that without a draft.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import torch

import linexport
from linexport import models
from linexport.artifact import Artifact
from linexport.artifact.text.speculation import Draft
from linexport.models import data, scores, training

LENGTHS = (1, 2, 4, 5, 8, 9)
PROMPT, LAYERS, ROUNDS, THREADS = 256, 6, 5, 1


def trained(folder: Path, name: str, steps: int, **config: int) -> Artifact:
    """Train a language model on the source text, and convert it."""
    torch.manual_seed(0)
    model = models.build("language_model", config)
    text, window = data.library_text().train, torch.arange(129)

    def loss() -> torch.Tensor:
        starts = torch.randint(len(text) - 128, (4, 1))
        return scores.next_byte_loss(model, text[starts + window], "mean")

    plan = training.TrainingPlan(steps, 4e-3)
    training.train_on_batches(model, loss, plan, lambda line: print(name, line, file=sys.stderr))
    models.save(model, folder / f"{name}.pt")
    linexport.convert(folder / f"{name}.pt", folder / name, bench=False)
    return linexport.load(folder / name, threads=THREADS)


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


def texts(model: Artifact, small: Artifact, tokens: int, temperature: float) -> list[Any]:
    """Return a row for each draft: its speed beside no draft, and what was accepted."""
    drafts: dict[str, Draft | None] = {
        "none": None,
        "prompt look-up": linexport.NGramDraft(),
        "second artifact": small.draft(),
    }
    times: dict[str, list[float]] = {name: [] for name in drafts}
    equal, held_out = dict.fromkeys(drafts, True), data.library_text().held_out
    for seed in range(ROUNDS):
        begin = np.random.default_rng(seed).integers(len(held_out) - PROMPT)
        prompt = held_out[begin : begin + PROMPT].numpy().astype(np.int64)
        given = {"max_tokens": tokens, "temperature": temperature, "seed": seed}
        written = {}
        for name, draft in drafts.items():
            start = time.perf_counter()
            written[name] = list(model.generate(prompt, draft=draft, **given))
            times[name].append(time.perf_counter() - start)
            equal[name] &= written[name] == written["none"]
    alone = np.array(times["none"])
    return [
        {
            "draft": name,
            "temperature": temperature,
            "tokens_per_second": round(tokens / float(np.median(times[name])), 1),
            "times_as_fast": round(float(np.median(alone / np.array(times[name]))), 2),
            "proposed": draft.proposed if draft else 0,
            "accepted": draft.accepted if draft else 0,
            "calls": draft.calls if draft else ROUNDS * (tokens - 1),
            "equal": equal[name],
        }
        for name, draft in drafts.items()
    ]


def main() -> None:
    """Print and write the numbers; exit 1 where a text is another one."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--steps", type=int, default=120, help="of training")
    options.add_argument("--tokens", type=int, default=128)
    measurement.add_option(options)
    given = options.parse_args()
    heads = given.dim // 64
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sizes = {"dim": given.dim, "num_heads": heads, "layers": LAYERS}
        large = trained(folder, "large", given.steps, **sizes)
        small = trained(folder, "small", 2 * given.steps, dim=64, num_heads=1, layers=1)
        call_ms, small_ms = calls(large), calls(small)[1]
        rows = [row for t in (0.0, 0.8) for row in texts(large, small, given.tokens, t)]
    for row in rows:
        print(row)
    load = Path("/proc/loadavg").read_text().split()[:3]
    result = {"dim": given.dim, "layers": LAYERS, "call_ms": call_ms, "small_ms": small_ms}
    measurement.write(given.json, {**result, "rows": rows, "load": load})
    print(result, "load average", *load)
    sys.exit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
