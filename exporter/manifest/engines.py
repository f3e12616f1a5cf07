"""Records of the TensorRT engines of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLayerRecord:
    """One layer of an engine, as TensorRT names it."""

    name: str
    type: str


@dataclass(frozen=True)
class ProfileRecord:
    """Smallest, usual and largest sizes of every named dimension."""

    name: str
    dims: dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class EngineLatencyRow:
    """Milliseconds of an engine at one length: launched each time, and replayed as a CUDA graph."""

    length: int
    launched_ms: float
    graph_ms: float | None
    graph_problem: str | None


@dataclass(frozen=True)
class EngineRecord:
    """One engine file.

    Attributes:
        file: its name.
        sha256: its digest.
        runtime: the flavour of TensorRT that runs it.
        version: version of that library; no other one opens it.
        sm: compute capability it is for, ten times its number.
        precision: of weights and activations.
        plugins: nodes that plugins run.
        layers: all layers.
        scratch_bytes: largest scratch memory of a layer.
        layer_scratch_bytes: scratch memory by layer.
        activation_bytes: memory for activations.
        profiles: ranges of sizes it has kernels for.
        plugin_library: it needs linexport's plugins registered.
        in_place: present states that may take the memory of their pasts.
        logits: the output that has only the tokens whose places the engine's input ``logits_at``
            gives, (batch, n) int64; None where outputs have all tokens.
        note: what the user should know of the build.
        checked: it equals the original; None where it was not run.
        reason: why not.
        max_relative_error: its largest error against the original.
        latency: a row per length, where it was timed.
    """

    file: str
    sha256: str
    runtime: str
    version: str
    sm: int
    precision: str
    plugins: tuple[str, ...]
    layers: tuple[EngineLayerRecord, ...]
    scratch_bytes: int
    layer_scratch_bytes: dict[str, int]
    activation_bytes: int
    profiles: tuple[ProfileRecord, ...]
    plugin_library: bool
    in_place: tuple[str, ...]
    logits: str | None = None
    note: str | None = None
    checked: bool | None = None
    reason: str | None = None
    max_relative_error: float | None = None
    latency: tuple[EngineLatencyRow, ...] = ()
