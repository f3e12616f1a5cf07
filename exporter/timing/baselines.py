"""The artifact, a plain export and eager PyTorch, each ready to be called at one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linexport import targets, trace
from linexport.graph import dims
from linexport.manifest.measured import DecodeRecord, LatencyRow, MemoryRow
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.reference.module import feeds
from linexport.sources.loaded_model import LoadedModel
from linexport.sources.memory_map import memory_map_weights, unmap_weights
from linexport.system import memory
from linexport.system.npz import save_npz
from linexport.system.torch_internals.compiled import functions_uncompiled
from linexport.system.torch_internals.trees import pytree
from linexport.targets import InferenceSession
from linexport.targets.base import DeviceSession, OrtSession
from linexport.targets.runtime.providers import CPU
from linexport.timing.admission import Admission, if_equal
from linexport.timing.latency import BenchPlan, Call, Called, Settings, latency_table, measure
from linexport.timing.peak_memory import peak_megabytes
from linexport.trace.messages import error_summary, innermost

LEAD_IN = 4


@dataclass
class Bench:
    """Measures a converted model and its baselines: a plain export and the original in PyTorch.

    Args:
        tested: the converted model with its original.
        model: the artifact's model file.
        target: name of its target.
        native: open it with the CPU library, where one is built; as ``linexport.load`` would.
        work: an existing folder for temporary files.
        extent: of the measurement.
        loading: options that the original was loaded with.
    """

    tested: ModelUnderTest
    model: Path
    target: str
    native: bool
    work: Path
    extent: BenchPlan
    seed: int = 0
    loading: Mapping[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    artifact: InferenceSession | None = None
    plain: OrtSession | None = None
    plain_path: Path | None = None
    plain_nodes: int | None = None
    notes: list[str] = field(default_factory=list)
    moved: dict[int, float] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """Settings of each measurement."""
        return self.extent.settings

    def __post_init__(self) -> None:
        self.admission = Admission(self.settings.longest)

    def export_plainly(self, program: torch.export.ExportedProgram | None = None) -> None:
        """Make the plain export; what stops it becomes the reason of its empty columns."""
        loaded = self.tested.loaded
        if loaded.graph is not None:
            self.reasons["pytorch"] = "the original is an ONNX file, without a PyTorch module"
        try:
            self.plain_path, self.plain_nodes = trace.plain_export(loaded, self.work, program)
            memory.trim_memory()
            self.plain = OrtSession(self.plain_path, self.settings.threads, taking_turns=True)
        except Exception as error:
            reason = error_summary(innermost(error))[:200]
            self.reasons["plain_export"] = f"plain torch.onnx.export fails: {reason}"

    def latency(self, lengths: tuple[int, ...] | None = None) -> list[LatencyRow]:
        """A row per length at batch 1, or per batch where the model has no dynamic length."""
        sequence = dims.sequence(self.tested.dims)
        if sequence is None:
            return self._latency_by_batch()
        limits = self.tested.dims[sequence]
        allowed = [n for n in lengths or self.extent.lengths if limits.allows(n)]
        refused = sorted(set(lengths or ()) - set(allowed))
        if refused:
            self.notes.append(f"Not measured at {refused}: outside the range of {sequence}.")
        return latency_table(
            allowed or [limits.nearest(self.tested.traced[sequence])],
            lambda n: self._calls({sequence: n}),
            self.reasons,
            self.settings,
            self._batch({}),
        )

    def _latency_by_batch(self) -> list[LatencyRow]:
        """A row per batch, or the one row of a model all of whose dimensions are fixed."""
        shapes = (s for s in self.tested.input_shapes if len(s) > 1)
        length = next((s[1] for s in shapes if isinstance(s[1], int)), 1)
        sizes: list[dict[str, int]] = [{}]
        for name, limits in self.tested.dims.items():
            allowed = [n for n in self.extent.batches if limits.allows(n)]
            sizes = [{name: n} for n in allowed] or sizes
        return [
            LatencyRow(
                **vars(measure(self._calls(size), self.reasons, self.settings)),
                length=length,
                batch=self._batch(size),
            )
            for size in sizes
        ]

    def decode(self) -> DecodeRecord | None:
        """One token with the states carried over; None where the artifact has none."""
        tested, sequence = self.tested, dims.sequence(self.tested.dims)
        if not tested.states or sequence is None or not tested.dims[sequence].allows(1):
            return None
        inputs, fed = self._inputs({sequence: 1})
        state, session = self.state({}), self.opened()
        if isinstance(session, DeviceSession):  # where a stream has them
            state = session.hold(state)
        step = _eager_step(tested.loaded, inputs)
        reasons = {
            "pytorch": "the module has no step with a state to call",
            **self.reasons,
            "plain_export": "it has no state: a step would run the whole prefix again",
        }
        calls: dict[str, Call | None] = {
            "artifact": lambda: session.run({**fed, **state}),
            "pytorch": step,
        }
        return DecodeRecord(
            **vars(measure(calls, reasons, replace(self.settings, lead_in=LEAD_IN)))
        )

    def memory(self, lengths: tuple[int, ...]) -> list[MemoryRow]:
        """Peak megabytes of one run, each in a process of its own.

        ``io_mb`` is what goes in and out, where the latency was taken at that length.
        """
        self.artifact = self.plain = None  # what they hold is not held twice
        memory.trim_memory()
        return [self._memory_row(length) for length in lengths]

    def _memory_row(self, length: int) -> MemoryRow:
        sequence = dims.sequence(self.tested.dims)
        small = {sequence: min(8, length)} if sequence else {}
        files = {}
        for name, sizes in (("small", small), ("inputs", {sequence: length} if sequence else {})):
            _, fed = self._inputs(sizes)
            plain, full = self.work / f"plain-{name}.npz", self.work / f"full-{name}.npz"
            save_npz(plain, fed)
            state = self.state(sizes)
            save_npz(full, {**fed, **state})
            files[name] = (plain, full)
        tokens = self._tokens({sequence: length} if sequence else {})
        moved = self.moved.get(tokens)
        peaks: dict[str, float | None] = {}
        reasons: dict[str, str] = {}
        tested = self.tested
        location = tested.loaded.source.location
        sessions = {
            "artifact": ("onnx", str(self.model), 1, self.target, tested.execution.provider),
            "plain_export": ("onnx", str(self.plain_path), 0, "ort", CPU),
            "pytorch": ("pytorch", location, 0, "", CPU),
        }
        for name, (kind, path, which, target, provider) in sessions.items():
            reason = self.reasons.get(name) or self.admission.too_slow(name, tokens)
            if kind == "pytorch" and tested.loaded.source.kind == "object":
                reason = reason or "the original is an object of this process: no other can load it"
            peak = None
            if reason is None:
                peak, reason = peak_megabytes(
                    kind,
                    path,
                    files["inputs"][which],
                    files["small"][which],
                    target,
                    self.loading,
                    provider,
                )
            peaks[f"{name}_mb"] = peak
            if reason:
                reasons[name] = reason
        return MemoryRow(length=length, io_mb=moved, **peaks, reasons=reasons)

    def _inputs(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, np.ndarray]]:
        tested = self.tested
        case = Case("timing", self._sizes(sizes), self.seed)
        inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
        return inputs, feeds(inputs, tested.input_names)

    def _sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes as given; else batch 1 and the traced length, or as near as the model takes."""
        found = {
            name: limits.nearest(1 if limits.batch else self.tested.traced[name])
            for name, limits in self.tested.dims.items()
        }
        return {**found, **sizes}

    def opened(self) -> InferenceSession:
        """Return the artifact, as it is deployed."""
        if self.artifact is None:
            target = targets.find_target(self.target)
            self.artifact = target.open(
                self.model,
                threads=self.settings.threads,
                taking_turns=True,
                native=self.native,
                execution=self.tested.execution,
            )
        return self.artifact

    def _batch(self, sizes: Mapping[str, int]) -> int:
        shape = self.tested.input_shapes[0]
        fixed = shape[0] if shape and isinstance(shape[0], int) else 1
        named = (d for d, limits in self.tested.dims.items() if limits.batch)
        return next((self._sizes(sizes)[d] for d in named), fixed)

    def fed(self, length: int) -> dict[str, np.ndarray]:
        """Return inputs of so many tokens, states aside."""
        sequence = dims.sequence(self.tested.dims)
        return self._inputs({sequence: length} if sequence else {})[1]

    def whole(self, runner: str, length: int) -> Call:
        """Return a call of a baseline over so many tokens.

        Args:
            runner: "plain_export" or "pytorch".
            length: tokens.
        """
        sequence = dims.sequence(self.tested.dims)
        (args, kwargs), fed = self._inputs({sequence: length} if sequence else {})
        if runner == "plain_export":
            plain = self.plain
            assert plain is not None
            names = [i.name for i in plain.inner.get_inputs()]
            named = dict(zip(names, fed.values(), strict=False))
            return lambda: plain.run(named)
        unmap_weights(self.tested.loaded)
        module = self.tested.loaded.module

        def eager() -> object:
            with torch.no_grad(), functions_uncompiled():
                return module(*args, **kwargs)

        return eager

    def state(self, sizes: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """Return states that begin sequences; ``sizes`` names the batch, 1 without it."""
        return self.tested.initial_state(self.tested.batch(self._sizes(sizes or {})))

    def _calls(self, sizes: Mapping[str, int]) -> dict[str, Call | None]:
        tested, session, plain = self.tested, self.opened(), self.plain
        tokens, admission = self._tokens(sizes), self.admission
        slow = admission.too_slow("pytorch", tokens)
        (memory_map_weights if slow else unmap_weights)(tested.loaded)
        (args, kwargs), fed = self._inputs(sizes)
        state = self.state(sizes)
        names = [i.name for i in plain.inner.get_inputs()] if plain else []
        by_position = dict(zip(names, fed.values(), strict=False))

        def eager() -> object:
            with torch.no_grad(), functions_uncompiled():
                return tested.loaded.module(*args, **kwargs)

        def artifact() -> dict[str, np.ndarray]:
            return session.run({**fed, **state})

        def plainly() -> dict[str, np.ndarray]:
            assert plain is not None
            return plain.run(by_position)

        ours = Called(artifact)
        moved = sum(a.nbytes for a in [*fed.values(), *ours.outcome.values()])
        self.moved[tokens] = round(moved / 2**20, 3)
        plain_call = admission.once("plain_export", plainly, tokens) if plain else None
        if tested.loaded.graph is not None:  # the plain export is the original
            return {"artifact": ours, "plain_export": plain_call}
        original = admission.once("pytorch", eager, tokens)
        if isinstance(original, Called):
            leaves = pytree.tree_leaves(original.take())
            expected = [x.numpy() for x in leaves if isinstance(x, torch.Tensor)]
        else:
            # It was not waited for: the artifact, which is proven, stands in for it.
            expected = [ours.outcome[name] for name in tested.output_names]
        if isinstance(plain_call, Called):
            plain_call = if_equal(plain_call, expected)
        return {"artifact": ours, "plain_export": plain_call, "pytorch": original}

    def _tokens(self, sizes: Mapping[str, int]) -> int:
        """Values along the dynamic dimensions."""
        return math.prod(self._sizes(sizes).values())


def _eager_step(loaded: LoadedModel, inputs: tuple[object, ...]) -> Call | None:
    """``module.step(x, state)`` on one token, where the module has such a method."""
    module: object = loaded.module
    if not (hasattr(module, "step") and hasattr(module, "initial_state")):
        return None
    unmap_weights(loaded)
    args = pytree.tree_leaves(inputs)
    # Made by the first call: what that raises is the reason why the step has no time.
    initial_state = cache(lambda: module.initial_state(1))

    def step() -> object:
        with torch.no_grad():
            return module.step(*args, initial_state())

    return step
