"""Time and memory of converting a user's 12-layer model, stage by stage.

    python tools/bench_convert.py [--model cumsum|quadratic] [--layers 12] [--json FILE]

The model is written as people write it: width 512, 8 heads of 64, elu(x) + 1, and attention as a
cumulative sum of outer products or as scores under a triangular mask. Every stage's peak is counted
from what was resident before the conversion began, in multiples of the model's weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401  # libraries are not what a model takes
import torch
from torch import Tensor, nn

import linexport

WIDTH, HEADS, EPS = 512, 8, 1e-6
LAYERS = int(os.environ.get("LAYERS", "12"))
LIMIT_SECONDS, LIMIT_MEMORY = 90, 4


def cumsum_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, T, H, d) each: the state after every token, all at once."""
    state = torch.cumsum(torch.einsum("bthd,bthe->bthde", k, v), dim=1)
    normaliser = torch.einsum("bthd,bthd->bth", q, torch.cumsum(k, dim=1))
    return torch.einsum("bthd,bthde->bthe", q, state) / (normaliser[..., None] + EPS)


def quadratic_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, T, H, d) each: all scores, those of later keys set to zero."""
    scores = torch.tril(torch.einsum("bthd,bshd->bhts", q, k))
    attended = torch.einsum("bhts,bshe->bthe", scores, v)
    return attended / (scores.sum(-1).transpose(1, 2)[..., None] + EPS)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before and a residual around it."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        phi = nn.functional.elu
        x = x + self.out(self.attention(phi(q) + 1, phi(k) + 1, v).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def _model(attention: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attention) for _ in range(LAYERS))), (torch.randn(2, 64, WIDTH),)


def cumsum() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A factory, as ``linexport convert`` takes it."""
    return _model(cumsum_attention)


def quadratic() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A factory, as ``linexport convert`` takes it."""
    return _model(quadratic_attention)


class Peaks:
    """Megabytes above what was resident before, the highest of each stage."""

    def __init__(self) -> None:
        self.before = _resident("VmRSS")
        self.stages: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See ``linexport.progress.Progress``."""
        Path("/proc/self/clear_refs").write_text("5")
        yield
        self.stages.append((name, _resident("VmHWM") - self.before))


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measured(name: str) -> dict[str, Any]:
    """One conversion, in this process."""
    weights = sum(p.numel() * 4 for p in globals()[name]()[0].parameters()) / 2**20
    peaks = Peaks()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        manifest = linexport.convert(f"bench_convert:{name}", Path(work) / "out", progress=peaks)
    seconds = time.perf_counter() - start
    stages = [
        {**timed, "peak_mb": round(peak)}
        for timed, (_, peak) in zip(manifest["stages"], peaks.stages, strict=True)
    ]
    return {
        "model": name,
        "layers": LAYERS,
        "fused": manifest["fused"],
        "status": manifest["status"],
        "weights_mb": round(weights),
        "seconds": round(seconds, 1),
        "peak_mb": max(s["peak_mb"] for s in stages),
        "original_mb": {r["length"]: r["pytorch_mb"] for r in manifest["memory"]},
        "stages": stages,
        "warnings": manifest["warnings"],
        "latency": manifest["latency"],
    }


def main() -> None:
    """A table of stages for each model."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", choices=("cumsum", "quadratic"))
    options.add_argument("--layers", type=int, default=LAYERS)
    options.add_argument("--json", type=Path)
    options.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.here:
        print(json.dumps(measured(given.model)))
        return
    rows = []
    for name in [given.model] if given.model else ["cumsum", "quadratic"]:
        # From its own folder: the factories are importable there, for every process of the conversion.
        done = subprocess.run(
            [sys.executable, Path(__file__).name, "--here", "--model", name],
            cwd=Path(__file__).parent,
            env={**os.environ, "LAYERS": str(given.layers)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        _show(rows[-1])
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


def _show(row: dict[str, Any]) -> None:
    weights = row["weights_mb"]
    print(f"{row['model']}, {row['layers']} layers, {weights} MB: {row['status']}, {row['fused']}")
    for stage in row["stages"]:
        peak = stage["peak_mb"]
        print(f"  {stage['name']:10} {stage['seconds']:7.1f} s {peak:6} MB {peak / weights:5.1f} x")
    print(f"  {'all':10} {row['seconds']:7.1f} s {row['peak_mb']:6} MB", flush=True)


if __name__ == "__main__":
    main()
