"""Where the time of a conversion goes, from prompt to prompt, by size of the model.

    python tools/bench_stages.py [SIZE ...] [--repeats 3] [--json FILE]

Each run is the command as a user types it, in a process of its own: what passes until the first
stage is the start of Python and the import of libraries, stages are those of the manifest, and what
is left is the report and the end of the process. The run of the median total is kept. Attention is
written with cumulative sums, in heads of 64; every model but the first looks token ids up, and has
logits.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

HEAD = 64


@dataclass(frozen=True)
class Size:
    """A model; without a vocabulary it takes and gives vectors."""

    layers: int
    width: int
    vocabulary: int = 0


SIZES = {
    "layer": Size(1, 256),
    "small": Size(12, 256, 256),
    "large": Size(12, 512, 32_000),
}

PARTS = {
    "rewrite": ("rewrite", "lower", "write"),
    "compare": ("parity", "streaming"),
}
"""Stages that are counted as one."""


def layer() -> tuple[nn.Module, tuple[Any, ...]]:
    """A factory, as ``linexport convert`` takes it."""
    return _model(SIZES["layer"])


def small() -> tuple[nn.Module, tuple[Any, ...]]:
    """A factory, as ``linexport convert`` takes it."""
    return _model(SIZES["small"])


def large() -> tuple[nn.Module, tuple[Any, ...]]:
    """A factory, as ``linexport convert`` takes it."""
    return _model(SIZES["large"])


def _model(size: Size) -> tuple[nn.Module, tuple[Any, ...]]:
    import torch
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                nn.Linear(4 * width, width),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEAD)).unbind(2)
            q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
            states = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
            norm = torch.einsum("bthd,bthd->bth", q, k.cumsum(1))
            attended = torch.einsum("bthd,bthde->bthe", q, states) / (norm[..., None] + 1e-6)
            x = x + self.out(attended.flatten(2))
            return x + self.mlp(x)

    torch.manual_seed(0)
    layers = [Layer(size.width) for _ in range(size.layers)]
    if not size.vocabulary:
        return nn.Sequential(*layers), (torch.randn(2, 16, size.width),)
    table = nn.Embedding(size.vocabulary, size.width)
    head = nn.Linear(size.width, size.vocabulary, bias=False)
    ids = torch.randint(size.vocabulary, (2, 16))
    return nn.Sequential(table, *layers, nn.LayerNorm(size.width), head), (ids,)


def converted(name: str) -> dict[str, Any]:
    """Return the seconds of each part of one conversion."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "out")
        command = [sys.executable, "-m", "linexport", "convert", f"{__file__}:{name}", "-o", out]
        start, busy = time.perf_counter(), _processor()
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as run:
            assert run.stderr is not None
            first = run.stderr.readline()
            begun = time.perf_counter() - start
            rest = run.stderr.read().decode()
        total, busy = time.perf_counter() - start, _processor() - busy
        if run.returncode:
            raise SystemExit(f"{name}: exit code {run.returncode}\n{first.decode()}{rest}")
        manifest = json.loads((out / "manifest.json").read_text())
    taken = {one["name"]: one["seconds"] for one in manifest["stages"]}
    seconds = {"import": begun}
    for part, stages in PARTS.items():
        seconds[part] = sum(taken.pop(stage, 0.0) for stage in stages)
    seconds |= taken
    seconds["report"] = total - sum(seconds.values())
    parts = {part: round(taken, 1) for part, taken in seconds.items()}
    return {"total": round(total, 1), "processor_seconds": round(busy, 1), "parts": parts}


def _processor() -> float:
    """Return the seconds that processors have worked for processes which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def median_of(name: str, repeats: int) -> dict[str, Any]:
    """Return the run of the median total, with the size of the model."""
    runs = sorted((converted(name) for _ in range(repeats)), key=lambda run: float(run["total"]))
    found = runs[len(runs) // 2]
    totals = [run["total"] for run in runs]
    parameters = sum(p.numel() for p in _model(SIZES[name])[0].parameters())
    print(f"{name:6} {totals} {found['parts']}", file=sys.stderr, flush=True)
    return {
        "name": name,
        **asdict(SIZES[name]),
        "parameters": parameters,
        "totals": totals,
        **found,
    }


def main() -> None:
    """Measure the sizes that are named, by default all."""
    import measurement

    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("sizes", nargs="*", choices=[*SIZES, []], help=", ".join(SIZES))
    options.add_argument("--repeats", type=int, default=3)
    measurement.add_option(options)
    given = options.parse_args()
    rows = []
    for name in given.sizes or SIZES:
        rows.append(median_of(name, given.repeats))
        load = round(os.getloadavg()[2], 1)
        found = {"repeats": given.repeats, "load_average": load, "sizes": rows}
        measurement.write(given.json, found)  # what is there, where a later size is not waited for


if __name__ == "__main__":
    main()
