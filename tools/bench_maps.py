"""Feature maps beside what else there is: another favor+, materialised features, eager PyTorch.

    python tools/bench_maps.py favor      favor+ beside performer-pytorch's, by output error
    python tools/bench_maps.py taylor2    the converted layer beside its plain export
    python tools/bench_maps.py eager      every map's exported layer beside eager PyTorch

``--json FILE`` keeps the numbers. performer-pytorch is no dependency of linexport: install it for
the first with ``pip install --no-deps performer-pytorch einops axial-positional-embedding
local-attention hyper-connections``; without it that column is left out, and the reason printed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import torch

import linexport
from linexport import models, trace
from linexport.errors import UsageError
from linexport.maps import cost
from linexport.models import feature_maps
from linexport.models.linear_attention_layer import (
    LinearAttentionLayer,
    LinearAttentionLayerConfig,
)
from linexport.sources import load_model
from linexport.targets.base import OrtSession
from linexport.timing.latency import Settings, interleaved
from linexport.timing.peak_memory import peak_megabytes

WIDTH, FEATURES, SEEDS = 64, 256, 10
HEADS = 8
NARROW = 4
"""Head width of maps that take no wider one."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of a seed and of q, k, v as (heads, T, d)."""


def favor() -> dict[str, Any]:
    """Output error against softmax, bidirectional, over the same draws of data."""
    sessions: dict[str, Attention] = {
        "favor+flat": partial(_linexport_favor, "favor+flat"),
        "favor+": partial(_linexport_favor, "favor+"),
        "mean of the values": lambda seed, q, k, v: v.mean(1, keepdim=True).expand_as(v),
    }
    performer, reason = _performer()
    if performer:
        sessions["performer-pytorch"] = performer
    else:
        print(f"performer-pytorch: not measured: {reason}")
    found: dict[str, Any] = {"reason": reason}
    for name, attend in sessions.items():
        errors = [_output_error(attend, seed) for seed in range(SEEDS)]
        mean, spread = float(np.mean(errors)), float(np.std(errors, ddof=1))
        found[name] = {"mean": mean, "deviation": spread, "errors": errors}
        print(f"{name}: output error {mean:.4f}, deviation {spread:.4f} over {SEEDS} seeds")
    if performer:
        both = (found[n]["errors"] for n in ("favor+flat", "performer-pytorch"))
        differences = [ours - theirs for ours, theirs in zip(*both, strict=True)]
        error = float(np.std(differences, ddof=1)) / math.sqrt(SEEDS)
        mean = np.mean(differences)
        print(f"favor+flat less performer-pytorch {mean:+.4f}, standard error {error:.4f}")
    return found


def _output_error(attend: Attention, seed: int) -> float:
    random = torch.Generator().manual_seed(1000 + seed)
    q, k, v = torch.randn(3, 4, 1024, WIDTH, generator=random)
    want = (q @ k.mT / math.sqrt(WIDTH)).softmax(-1) @ v
    return float((attend(seed, q, k, v) - want).norm() / want.norm())


def _linexport_favor(
    kind: str, seed: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The layer; a floor is fitted to other draws than those it is judged on."""
    config = LinearAttentionLayerConfig(
        num_heads=len(q),
        head_dim=WIDTH,
        feature_map=kind,
        feature_map_options={"features": FEATURES, "seed": seed},
        causal=False,
        eps=0.0,
    )
    packed = (x.transpose(0, 1).flatten(1)[None] for x in (q, k, v))
    layer = LinearAttentionLayer(config)
    fit = getattr(layer.feature_map, "fit", None)
    if fit is not None:
        fit(*np.random.default_rng(seed).standard_normal((2, 4096, WIDTH)))
    with torch.no_grad():
        out: torch.Tensor = layer(*packed)[0]
    return out.unflatten(-1, (len(q), -1)).transpose(0, 1)


def _performer() -> tuple[Attention | None, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from performer_pytorch import FastAttention
    except ImportError as error:
        return None, f"{error}"

    def attend(seed: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed)
        layer = FastAttention(dim_heads=WIDTH, nb_features=FEATURES, causal=False)
        with torch.no_grad():
            out: torch.Tensor = layer(q[None], k[None], v[None])[0]
        return out

    return attend, None


def taylor2(length: int = 4096) -> dict[str, Any]:
    """Time and peak memory of a converted causal layer, and of its plain export."""
    config = LinearAttentionLayerConfig(num_heads=HEADS, head_dim=WIDTH, feature_map="taylor2")
    settings = Settings(warmup=1, repeats=5, seconds=30.0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = folder / "layer.pt"
        models.save(LinearAttentionLayer(config), source)
        linexport.convert(source, folder / "artifact", bench=False)
        plain = folder / "plain.onnx"
        program = trace.export_program(load_model(source))
        trace.plain_onnx(program, plain)
        paths = {"artifact": folder / "artifact" / "model.onnx", "plain": plain}
        memory, sessions = {}, {}
        for name, path in paths.items():
            session = OrtSession(path, taking_turns=True)
            files = []
            for size in (length, 8):
                files.append(folder / f"{name}-{size}.npz")
                np.savez(files[-1], allow_pickle=False, **_feeds(session, config, size))
            memory[name], reason = peak_megabytes("onnx", str(path), *files)
            if reason:
                print(f"{name}: memory not measured: {reason}")
            sessions[name] = (session, _feeds(session, config, length))
        calls = {n: (lambda s=s, fed=fed: s.run(fed)) for n, (s, fed) in sessions.items()}
        outputs = [next(iter(call().values())) for call in calls.values()]
        apart = float(np.abs(outputs[0] - outputs[1]).max() / np.abs(outputs[1]).max())
        times = {n: float(np.median(t)) for n, t in interleaved(calls, settings).items()}
    for name in paths:
        print(f"{name}: {times[name]:.1f} ms, peak {memory[name]} MB")
    speed = times["plain"] / times["artifact"]
    share = (memory["artifact"] or math.nan) / (memory["plain"] or math.nan)
    print(f"{speed:.2f} times as fast, {share:.1%} of the memory; outputs differ by {apart:.1e}")
    return {"length": length, "ms": times, "peak_mb": memory, "speed": speed, "memory": share}


def _feeds(
    session: OrtSession, config: LinearAttentionLayerConfig, length: int
) -> dict[str, np.ndarray]:
    """Random inputs, and zeros for states."""
    drawn = LinearAttentionLayer(config).example_inputs(1, length, 0)
    values = iter(x.numpy() for x in drawn)
    fed = {}
    for info in session.inner.get_inputs():
        if info.name.startswith("past"):
            fed[info.name] = np.zeros([d if isinstance(d, int) else 1 for d in info.shape], "f4")
        else:
            fed[info.name] = next(values)
    return fed


def eager(length: int = 1024) -> dict[str, Any]:
    """Every map with its own defaults, at d = 64 or as wide as it can be."""
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        for kind in feature_maps.kinds():
            rows[kind] = _beside_eager(kind, length, Path(place))
            row = rows[kind]
            print(
                f"{kind} (d = {row['d']}, M = {row['features']}): exported {row['exported']:.2f} "
                f"ms, eager {row['eager']:.2f} ms, {row['speed']:.2f} times as fast",
                flush=True,
            )
    slow = [kind for kind, row in rows.items() if row["speed"] < 1]
    print(f"slower than eager: {', '.join(slow) or 'none'}")
    return {"length": length, "rows": rows, "slower": slow}


def _beside_eager(kind: str, length: int, folder: Path) -> dict[str, Any]:
    width = WIDTH
    try:
        feature_maps.make(kind, width)
    except UsageError:
        width = NARROW
    config = LinearAttentionLayerConfig(
        num_heads=HEADS,
        head_dim=width,
        feature_map=kind,
        causal=not feature_maps.find_map(kind).over_time,
    )
    module = LinearAttentionLayer(config).eval()
    path = cost.export(config, folder / kind.replace("*", "-"))
    session = OrtSession(path, taking_turns=True)
    fed = cost.inputs(config, length)
    args = tuple(torch.from_numpy(x) for x in fed.values())

    def original() -> object:
        with torch.no_grad():
            return module(*args)

    calls = {"exported": lambda: session.run(fed), "eager": original}
    settings = Settings(warmup=2, repeats=9, seconds=1.5)
    times = {n: float(np.median(t)) for n, t in interleaved(calls, settings).items()}
    speed = times["eager"] / times["exported"]
    return {"d": width, "features": module.feature_map.features, **times, "speed": speed}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "favor": favor,
    "taylor2": taylor2,
    "eager": eager,
}


def main() -> None:
    """Run the parts that were named, or all."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    measurement.add_option(options)
    given = options.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        options.error(f"no part {unknown[0]!r}; expected {', '.join(PARTS)}")
    result: dict[str, Any] = {}
    for part in given.parts or PARTS:
        print(f"[{part}]")
        result[part] = PARTS[part]()
    measurement.write(given.json, result)


if __name__ == "__main__":
    main()
