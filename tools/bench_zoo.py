"""Bidirectional models of others: the artifact beside a plain export, milliseconds and their ratio.

python tools/bench_zoo.py [NAME ...]        needs linexport[zoo] and timm

The last column says which of them give what the module gives.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils import _pytree as pytree

from linexport import passes, targets, trace
from linexport.loaders import load_model
from linexport.targets.base import OrtSession
from linexport.targets.lowering import lower

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

NAMES: tuple[str, ...] = (
    "efficientvit",
    "sana_transformer",
    "dcae_linear",
    "loftr_transformer",
    "performer",
    "linear_transformer",
)
REPEATS = 60


def main(names: Sequence[str]) -> None:
    """Print one row a model."""
    print(f"{'model':20} {'fused':>6} {'artifact':>9} {'plain':>9} {'ratio':>6}  equal")
    for name in names:
        with tempfile.TemporaryDirectory() as work:
            print(_row(name, Path(work)), flush=True)


def _row(name: str, work: Path) -> str:
    source = f"zoo:{name}"
    loaded = load_model(source)
    rewritten = passes.rewrite(trace.trace(loaded).model, passes.STATELESS)
    target = targets.find(targets.DEFAULT)
    model, _ = lower(target.prepare(rewritten.model), target.candidates, None, {})
    ours = OrtSession(model.SerializeToString(), taking_turns=True)
    leaves = [x.numpy() for x in pytree.tree_leaves(loaded.args)]
    feeds = dict(zip((i.name for i in ours.inner.get_inputs()), leaves, strict=True))
    with torch.no_grad():
        expected = loaded.module(*loaded.args)
    expected = [x.numpy() for x in pytree.tree_leaves(expected)]
    path, _ = trace.plain_export(loaded, work)
    theirs = OrtSession(path, taking_turns=True)
    given = dict(zip((i.name for i in theirs.inner.get_inputs()), leaves, strict=True))
    equal = " and ".join(
        name
        for name, session, fed in (("artifact", ours, feeds), ("plain", theirs, given))
        if all(map(_close, session.run(fed).values(), expected))
    )
    times = _interleaved([lambda: ours.run(feeds), lambda: theirs.run(given)])
    fused = len(rewritten.findings.matches)
    ratio = times[0] / times[1]
    return f"{name:20} {fused:6} {times[0]:9.3f} {times[1]:9.3f} {ratio:6.2f}  {equal}"


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
    main(sys.argv[1:] or NAMES)
