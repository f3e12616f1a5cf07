"""Causal formulations at B = 1, H = 8, d = 64 beside linexport's own layer: exact, and as fast?

    python tools/bench_formulations [--length 1024] [--only NAME,NAME] [--json FILE]

Each one is exported, rewritten and lowered for ONNX Runtime, and takes turns with the artifact of
linexport's own layer with the same feature map, normaliser and decay, on the same tokens, and with
its graph as it was exported. What surrounds the attention, projections and rotary positions, is the
same on all sides.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import measurement
import numpy as np
import onnx
import torch
from torch.nn.functional import logsigmoid

from linexport import passes, targets
from linexport.graph import states
from linexport.manifest.matches import MatchRecord as Match
from linexport.models import feature_maps, functional
from linexport.targets.base import OrtSession
from linexport.targets.lowering.choice import lower
from linexport.timing.latency import Settings, interleaved
from linexport.trace.graph import to_onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support import formulations

HEADS, WIDTH, TRACED = 8, 64, 64
SETTINGS = Settings(warmup=3, repeats=11, seconds=1.5)


class Packed(torch.nn.Module):
    """A module of query, key and value on the three side by side."""

    def __init__(self, inner: torch.nn.Module, inputs: int = 3) -> None:
        super().__init__()
        self.inner, self.inputs = inner, inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(*x.chunk(3, -1)) if self.inputs == 3 else self.inner(x)


class Own(torch.nn.Module):
    """linexport's layer, as the match says the formulation is."""

    def __init__(self, match: Match, formulations: ModuleType, name: str) -> None:
        super().__init__()
        self.match, self.formulations, self.name = match, formulations, name
        self.maps = [
            feature_maps.find_map(kind or "identity")(WIDTH)
            for kind in (match.query_map, match.key_map)
        ]
        self.gate = torch.nn.Linear(HEADS * WIDTH, HEADS)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        m = self.match
        k = k[..., : m.key_heads * WIDTH]
        v = v[..., : m.kv_num_heads * WIDTH]
        decay = None
        if m.update_rule == "gated":
            rate = torch.linspace(-0.2, -0.01, HEADS)
            constant = self.name != "gated"
            decay = rate.expand(*q.shape[:2], HEADS) if constant else logsigmoid(self.gate(q))
        if self.name == "rotary":
            q, k = self.rotated(q), self.rotated(k)
        else:
            q = self.maps[0](q, m.q_num_heads, "query")
            k = self.maps[1](k, m.key_heads, "key")
        out, _, _ = functional.linear_attention(
            q,
            k,
            v,
            decay=decay,
            q_num_heads=m.q_num_heads,
            kv_num_heads=m.kv_num_heads,
            update_rule=m.update_rule,
            normalize=m.normalize,
            scale=m.scale,
            eps=m.eps,
        )
        return out

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return phi of x, rotated, with merged heads: the input of the attention."""
        s = self.formulations
        rotated: torch.Tensor = s.merge(s.rotate(s.phi(s.heads_first(x))))
        return rotated


class OwnBlock(torch.nn.Module):
    """The block around a formulation, with linexport's layer in it."""

    def __init__(self, block: torch.nn.Module, own: Own) -> None:
        super().__init__()
        self.block, self.own = block, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.own(*self.block.qkv(self.block.norm(x)).chunk(3, dim=-1))
        return x + self.block.out(attended)


def lowered(
    module: torch.nn.Module, inputs: int
) -> tuple[onnx.ModelProto, tuple[Match, ...], onnx.ModelProto]:
    """A module rewritten, with the functions of the default target, and as it was exported."""
    x = torch.randn(2, TRACED, inputs * HEADS * WIDTH)
    dynamic = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        program = torch.export.export(
            Packed(module, inputs), (x,), dynamic_shapes=({0: dynamic, 1: dynamic},), strict=False
        )
    traced = to_onnx(program, {})
    rewritten = passes.rewrite(traced)
    target = targets.find_target(targets.DEFAULT)
    model, _ = lower(target.prepare(rewritten.model), target.candidates, None, {})
    return model, rewritten.findings.matches, traced


def measured(name: str, formulations: ModuleType, length: int) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    formulation = formulations.CAUSAL[name]
    module = formulation.build().eval()
    model, matches, exported = lowered(module, formulation.inputs)
    # Two are a numerator and a denominator: the layer that does the same has a normaliser.
    match = replace(matches[-1], normalize=matches[-1].normalize or len(matches) > 1)
    own: torch.nn.Module = Own(match, formulations, name).eval()
    if formulation.inputs == 1:
        own = OwnBlock(module, own)  # type: ignore[arg-type]
    reference, _, _ = lowered(own, formulation.inputs)
    sessions, feeds = {}, {}
    x = torch.randn(1, length, formulation.inputs * HEADS * WIDTH)
    sides = {"formulation": model, "own": reference, "exported": exported}
    for who, proto in sides.items():
        session = OrtSession(proto.SerializeToString(), taking_turns=True)
        kept = {s.past: s for s in states.find_states(proto)}
        fed = {n: np.zeros([1, *s.shape[1:]], s.dtype) for n, s in kept.items()}
        first = next(i.name for i in session.inner.get_inputs() if i.name not in kept)
        positions = [i.name for i in session.inner.get_inputs() if i.name not in {*kept, first}]
        fed |= {n: np.zeros((), np.int64) for n in positions}
        sessions[who], feeds[who] = session, {first: x.numpy(), **fed}
    got = next(iter(sessions["formulation"].run(feeds["formulation"]).values()))
    torch.set_default_dtype(torch.float64)  # of masks that a formulation makes as well
    with torch.no_grad():
        expected = Packed(module.double(), formulation.inputs)(x.double()).numpy()
    torch.set_default_dtype(torch.float32)
    calls = {w: (lambda w=w: sessions[w].run(feeds[w])) for w in sessions}
    times = {n: float(np.median(t)) for n, t in interleaved(calls, SETTINGS).items()}
    return {
        "formulation": name,
        "fused": len(matches),
        "dynamic": all(len(m.proof.sizes) > 1 for m in matches),
        "relative_error": float(np.abs(got - expected).max() / np.abs(expected).max()),
        "ms": times,
        "ratio": times["formulation"] / times["own"],
        "ratio_to_exported": times["formulation"] / times["exported"],
    }


def load_formulations(length: int) -> ModuleType:
    """The formulations of the tests, at the sizes measured here."""
    formulations.HEADS, formulations.D, formulations.WIDTH = HEADS, WIDTH, HEADS * WIDTH
    formulations.LONGEST = max(length, TRACED) + 1
    return formulations


def main() -> None:
    """A line for each formulation."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--length", type=int, default=1024)
    options.add_argument("--only", default="")
    measurement.add_option(options)
    given = options.parse_args()
    formulations = load_formulations(given.length)
    rows = []
    for name in [n for n in given.only.split(",") if n] or formulations.CAUSAL:
        row = measured(name, formulations, given.length)
        rows.append(row)
        print(
            f"{name}: fused {row['fused']}, dynamic {row['dynamic']}, "
            f"error {row['relative_error']:.1e}, {row['ms']['formulation']:.2f} ms, "
            f"own layer {row['ms']['own']:.2f} ms, ratio {row['ratio']:.2f}, "
            f"as exported {row['ms']['exported']:.2f} ms",
            flush=True,
        )
    result = {
        "length": given.length,
        "count": len(rows),
        "largest_ratio": max(row["ratio"] for row in rows),
        "largest_ratio_to_exported": max(row["ratio_to_exported"] for row in rows),
        "largest_relative_error": max(row["relative_error"] for row in rows),
        "rows": rows,
    }
    measurement.write(given.json, result)


if __name__ == "__main__":
    main()
