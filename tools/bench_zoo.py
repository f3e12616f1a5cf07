"""Bidirectional models of others: the artifact beside a plain export, milliseconds and their ratio.

python tools/bench_zoo.py [--factor 8] [--json FILE] [NAME ...]        needs the extra zoo and timm

The tests' tiny models, at a batch of 1 and ``factor`` times the height, width and length they are
tested at: what a node costs by itself hardly counts then. The last column says which of them give
what the module gives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import torch
from torch.utils import _pytree as pytree

from linexport import passes, targets, trace
from linexport.graph.interface import tensor_records
from linexport.parity.cases import Case, draw_inputs
from linexport.sources import load_model
from linexport.targets.base import OrtSession
from linexport.targets.lowering.choice import lower

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support/factories"))

NAMES: tuple[str, ...] = (
    "efficientvit",
    "sana_transformer",
    "dcae_linear",
    "loftr_transformer",
    "performer",
    "linear_transformer",
)
REPEATS = 60


def main() -> None:
    """Print one row a model."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--factor", type=int, default=8)
    measurement.add_option(options)
    options.add_argument("names", nargs="*", default=NAMES)
    given = options.parse_args()
    print(f"{'model':20} {'fused':>6} {'artifact':>9} {'plain':>9} {'ratio':>6}  equal")
    rows = []
    for name in given.names:
        with tempfile.TemporaryDirectory() as work:
            row = _row(name, given.factor, Path(work))
        rows.append(row)
        print(
            f"{name:20} {row['fused']:6} {row['ms']['artifact']:9.3f} {row['ms']['plain']:9.3f} "
            f"{row['ratio']:6.2f}  {' and '.join(row['equal'])}",
            flush=True,
        )
    measurement.write(given.json, rows)


def _row(name: str, factor: int, work: Path) -> dict[str, Any]:
    source = f"zoo:{name}"
    loaded = load_model(source)
    traced = trace.trace(loaded)
    rewritten = passes.rewrite(traced.model, passes.STATELESS)
    target = targets.find_target(targets.DEFAULT)
    model, _ = lower(target.prepare(rewritten.model), target.candidates, None, {})
    ours = OrtSession(model.SerializeToString(), taking_turns=True)
    sizes = {
        n: 1 if limits.batch else factor * traced.example_sizes[n]
        for n, limits in traced.dims.items()
    }
    shapes = [i.shape for i in tensor_records(traced.model.graph.input)]
    args, _ = draw_inputs(loaded, shapes, Case("timing", sizes, 0))
    leaves = [x.numpy() for x in pytree.tree_leaves(args)]
    feeds = dict(zip((i.name for i in ours.inner.get_inputs()), leaves, strict=True))
    with torch.no_grad():
        expected = loaded.module(*args)
    expected = [x.numpy() for x in pytree.tree_leaves(expected)]
    path, _ = trace.plain_export(loaded, work)
    theirs = OrtSession(path, taking_turns=True)
    given = dict(zip((i.name for i in theirs.inner.get_inputs()), leaves, strict=True))
    equal = [
        who
        for who, session, fed in (("artifact", ours, feeds), ("plain", theirs, given))
        if all(map(_close, session.run(fed).values(), expected))
    ]
    times = _interleaved([lambda: ours.run(feeds), lambda: theirs.run(given)])
    return {
        "model": name,
        "fused": len(rewritten.findings.matches),
        "ms": {"artifact": times[0], "plain": times[1]},
        "ratio": times[0] / times[1],
        "equal": equal,
    }


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max())


def _interleaved(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median milliseconds of each, taking turns."""
    record: list[list[float]] = [[] for _ in calls]
    for repeat in range(5 + REPEATS):
        for call, kept in zip(calls, record, strict=True):
            time.sleep(0.005)
            start = time.perf_counter()
            call()
            if repeat >= 5:
                kept.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(kept) for kept in record]


if __name__ == "__main__":
    main()
