"""Time and memory of a layer with a map, exported and run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from linexport import targets, trace
from linexport.models.linear_attention_layer import (
    LinearAttentionLayer,
    LinearAttentionLayerConfig,
)
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.system.npz import save_npz
from linexport.targets import InferenceSession
from linexport.timing import export as timing
from linexport.timing.export import TARGET
from linexport.timing.latency import Call, Settings, interleaved
from linexport.timing.peak_memory import peak_megabytes

TRACED = 100
"""Tokens of the traced example: several chunks."""
SHORT = 8
SETTINGS = Settings(warmup=2, repeats=9, seconds=0.6)


def export(config: LinearAttentionLayerConfig, folder: Path) -> Path:
    """The model file of a layer without state, made as ``convert`` makes it."""
    module = LinearAttentionLayer(config).eval()
    loaded = LoadedModel(
        module=module,
        args=module.example_inputs(2, TRACED, 0),
        kwargs={},
        dynamic_shapes=module.dynamic_shapes(),
        source=Source("factory", "linexport.models", None, module.name),
    )
    return timing.export(trace.trace(loaded), folder)


def inputs(config: LinearAttentionLayerConfig, length: int) -> dict[str, np.ndarray]:
    """Standard normal query, key and value, batch 1."""
    module = LinearAttentionLayer(config)
    names = ("query", "key", "value")
    drawn = module.example_inputs(1, length, 0)
    return {name: x.numpy() for name, x in zip(names, drawn, strict=True)}


def times(
    models: Mapping[str, Path], fed: Mapping[str, np.ndarray], threads: int
) -> dict[str, float]:
    """Microseconds a token, the median of calls in which all take turns."""
    target = targets.find_target(TARGET)
    sessions: dict[str, InferenceSession] = {
        name: target.open(path, threads=threads, taking_turns=True) for name, path in models.items()
    }
    calls = {name: _call(session, fed) for name, session in sessions.items()}
    length = next(iter(fed.values())).shape[1]
    measured = interleaved(calls, SETTINGS)
    return {name: 1e3 * float(np.median(found)) / length for name, found in measured.items()}


def memory(
    model: Path, fed: Mapping[str, np.ndarray], folder: Path
) -> tuple[float | None, str | None]:
    """Peak bytes a token of one run, in a process of its own; None and a reason where unknown."""
    length = next(iter(fed.values())).shape[1]
    files = folder / "full.npz", folder / "short.npz"
    for path, size in zip(files, (length, SHORT), strict=True):
        if not path.exists():
            save_npz(path, {n: x[:, :size] for n, x in fed.items()})
    peak, reason = peak_megabytes("onnx", str(model), *files, TARGET)
    return (None if peak is None else peak * 2**20 / length), reason


def _call(session: InferenceSession, fed: Mapping[str, np.ndarray]) -> Call:
    return lambda: session.run(fed)
