"""Time and memory of converting a user's 12-layer model, stage by stage.

    python tools/bench_convert.py [--model cumsum|quadratic|chunks] [--width 512] [--layers 12]
                                  [--json FILE]

The model is written as people write it: heads of 64, elu(x) + 1, and attention as a
cumulative sum of outer products, as scores under a triangular mask, or in chunks with a state
between them. Every stage's peak is counted from what was resident before the conversion began,
libraries that torch loads at its first export among it, in multiples of the model's weights
(parameters in float32). Of the peak, what is resident while neither the original nor a plain export
runs is linexport's own; what these take above that while they run stands beside it. Peak memory is
measured in processes of their own, which are not counted here.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measurement
import onnx_graphsurgeon  # noqa: F401  # libraries are not what a model takes
import onnxruntime  # noqa: F401
import onnxscript  # noqa: F401
import torch
from torch import Tensor, nn

import linexport
from linexport import trace
from linexport.manifest import to_json
from linexport.parity.reference.module import Reference
from linexport.sources import load_model
from linexport.timing.baselines import Bench

LAYERS, WIDTH = (
    int(os.environ.get(name, default)) for name, default in (("LAYERS", 12), ("WIDTH", 512))
)
MODELS = ("cumsum", "quadratic", "chunks")
PEAKS = ("peak_mb", "own_mb", "others_mb")
HEADS, CHUNK, EPS = WIDTH // 64, 64, 1e-6


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


def chunked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, T, H, d) each: scores within chunks of 64 tokens, a state between them."""
    length = q.shape[1]
    count = (length + CHUNK - 1) // CHUNK
    q, k, v = (
        nn.functional.pad(x, (0, 0, 0, 0, 0, count * CHUNK - length)).unflatten(1, (count, CHUNK))
        for x in (q, k, v)
    )
    states, sums = torch.einsum("bnshd,bnshe->bnhde", k, v), k.sum(2)
    states, sums = states.cumsum(1) - states, sums.cumsum(1) - sums
    scores = torch.einsum("bnthd,bnshd->bnhts", q, k).tril()
    attended = torch.einsum("bnhts,bnshe->bnthe", scores, v)
    attended = attended + torch.einsum("bnthd,bnhde->bnthe", q, states)
    normaliser = scores.sum(-1).transpose(2, 3) + torch.einsum("bnthd,bnhd->bnth", q, sums)
    return (attended / (normaliser[..., None] + EPS)).flatten(1, 2)[:, :length]


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


def chunks() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A factory, as ``linexport convert`` takes it."""
    return _model(chunked_attention)


def tiny() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A factory of next to nothing."""
    return nn.Linear(2, 2), (torch.zeros(3, 4, 2),)


class Watched:
    """Time and memory of every stage, and the share of the original and of a plain export."""

    def __init__(self, weights: float) -> None:
        self.before, self.weights = _resident("VmRSS"), weights
        self.stages: list[dict[str, Any]] = []
        self.own = self.others = self.peak = self.waited = self.plain = 0.0
        _watch(Reference, "__call__", self._apart)
        _watch(Bench, "export_plainly", lambda call: self._apart(call, keeps=True))
        _watch(Bench, "memory", self._closing)
        _watch(Bench, "_once", lambda once: lambda b, n, c, s: once(b, n, self._turn(n, c), s))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See ``linexport.system.progress.Progress``."""
        _forget_peak()
        self.own = self.others = self.peak = self.waited = 0.0
        start, busy = time.perf_counter(), _processor()
        yield
        self._note_own()
        row = {
            "name": name,
            "seconds": round(time.perf_counter() - start, 1),
            "processor_seconds": round(_processor() - busy, 1),
            "seconds_of_others": round(self.waited, 1),
            "peak_mb": round(max(self.own, self.peak)),
            "own_mb": round(self.own),
            "others_mb": round(self.others),
        }
        self.stages.append(row)
        peaks = "  ".join(
            f"{title} {row[key]:5} MB {row[key] / self.weights:5.1f} x"
            for title, key in (("peak", "peak_mb"), ("own", "own_mb"), ("others", "others_mb"))
        )
        print(
            f"  {name:10} {row['seconds']:7.1f} s, others {row['seconds_of_others']:6.1f} s  "
            f"{peaks}",
            file=sys.stderr,
            flush=True,
        )

    def _note_own(self) -> None:
        self.own = max(self.own, _resident("VmHWM") - self.before - self.plain)

    def _turn(self, name: str, call: Any) -> Any:
        return self._apart(call, keeps=name == "plain_export")

    def _closing(self, memory: Any) -> Any:
        """The session of the plain export is closed there."""

        def run(bench: Bench, lengths: tuple[int, ...]) -> Any:
            self._note_own()
            bench.plain, self.plain = None, 0.0
            memory.trim_memory()
            _forget_peak()
            return memory(bench, lengths)

        return run

    def _apart(self, call: Any, keeps: bool = False) -> Any:
        """A call of the original or of a plain export: time and memory are theirs.

        ``keeps``: so is what it leaves behind, a session and its buffers.
        """

        def run(*args: Any) -> Any:
            self._note_own()
            _forget_peak()
            held, start = _resident("VmRSS"), time.perf_counter()
            try:
                return call(*args)
            finally:
                self.waited += time.perf_counter() - start
                peak = _resident("VmHWM")
                self.others = max(self.others, peak - held)
                self.peak = max(self.peak, peak - self.before)
                if keeps:
                    self.plain += _resident("VmRSS") - held
                _forget_peak()

        return run


def _watch(owner: type, name: str, wrap: Any) -> None:
    wrapped = wrap(getattr(owner, name))
    setattr(owner, name, lambda *args: wrapped(*args))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _load_libraries() -> None:
    """torch loads some of them when it exports for the first time."""
    trace.trace(load_model("bench_convert:tiny"))


def _processor() -> float:
    """Seconds that processors have worked for this process and those it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measured(name: str) -> dict[str, Any]:
    """One conversion, in this process."""
    weights = sum(p.numel() * 4 for p in globals()[name]()[0].parameters()) / 2**20
    print(f"{name}, {LAYERS} layers, {weights:.0f} MB of weights", file=sys.stderr)
    _load_libraries()
    watched = Watched(weights)
    start, busy = time.perf_counter(), _processor()
    with tempfile.TemporaryDirectory() as work:
        manifest = linexport.convert(
            f"bench_convert:{name}", Path(work) / "out", bench="full", progress=watched
        )
    return {
        "model": name,
        "layers": LAYERS,
        "width": WIDTH,
        "fused": manifest.fused,
        "status": manifest.status,
        "weights_mb": round(weights),
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(_processor() - busy, 1),
        "seconds_of_others": round(sum(s["seconds_of_others"] for s in watched.stages), 1),
        **(peaks := {k: max(s[k] for s in watched.stages) for k in PEAKS}),
        "times_the_weights": {k.removesuffix("_mb"): v / weights for k, v in peaks.items()},
        "stages": watched.stages,
        "warnings": manifest.warnings,
        "latency": to_json(manifest)["latency"],
    }


def main() -> None:
    """Each model in a process of its own, which prints its stages as they end."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", choices=MODELS)
    options.add_argument("--layers", type=int, default=LAYERS)
    options.add_argument("--width", type=int, default=WIDTH)
    measurement.add_option(options)
    options.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.here:
        print(json.dumps(measured(given.model)))
        return
    rows = []
    for name in [given.model] if given.model else MODELS:
        # From its own folder, where the factories are importable.
        done = subprocess.run(
            [sys.executable, Path(__file__).name, "--here", "--model", name],
            cwd=Path(__file__).parent,
            env={**os.environ, "LAYERS": str(given.layers), "WIDTH": str(given.width)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{name}: {row['status']}, {row['fused']}, {row['seconds']} s, "
            f"of these others {row['seconds_of_others']} s; model {row['weights_mb']} MB, peak "
            f"{row['peak_mb']} MB, own {row['own_mb']} MB, others {row['others_mb']} MB",
            flush=True,
        )
    measurement.write(given.json, rows)


if __name__ == "__main__":
    main()
