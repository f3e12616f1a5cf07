"""The figures of one artifact, measured in turns with a yardstick of one matrix product."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from linexport import targets
from linexport.ci.figures import FORMAT, Figures, Timing
from linexport.graph import dims
from linexport.manifest import MODEL, Manifest
from linexport.parity import ModelUnderTest
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.reference.module import feeds
from linexport.system import environment
from linexport.system.npz import save_npz
from linexport.targets.base import OrtSession
from linexport.timing.peak_memory import peak_megabytes

PREFILL, MEMORY_LENGTH = 512, 1024
CALLS = 40
"""Calls of one figure."""

MEMORY_RUNS = 3


class Meter:
    """Measures the figures of one artifact.

    Args:
        folder: of the artifact.
        manifest: of it, with parity.
        tested: the artifact, whose inputs are drawn.
        threads: 0 for the runtime's choice.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tested: ModelUnderTest, threads: int
    ) -> None:
        self._model, self._manifest, self._tested = folder / MODEL, manifest, tested
        self._threads = threads
        self._session = targets.find_target(manifest.target).open(
            self._model, threads=threads, taking_turns=True
        )
        self._yardstick = _yardstick(threads)

    def figures(self, created: str) -> Figures:
        """Measure everything."""
        parity = self._manifest.parity
        assert parity is not None
        return Figures(
            format=FORMAT,
            linexport=self._manifest.linexport,
            created=created,
            cpu=str(environment.describe().get("cpu") or "unknown"),
            threads=self._threads,
            target=self._manifest.target,
            error=parity.max_relative_error,
            tolerance=parity.tolerance.relative,
            latency={name: self.timing(name, CALLS) for name in self._calls()},
            memory=self._memory(),
        )

    def timing(self, name: str, calls: int) -> Timing:
        """Time one kind of call, in turns with the yardstick."""
        call = self._calls()[name]
        for _ in range(3):
            call()
            self._yardstick()
        seconds = [(_seconds(call), _seconds(self._yardstick)) for _ in range(calls)]
        ratios = [own / other for own, other in seconds]
        ratio = statistics.median(ratios)
        spread = statistics.median(abs(r - ratio) for r in ratios)
        error = math.sqrt(math.pi / 2) * 1.4826 * spread / (ratio * math.sqrt(calls))
        return Timing(1e3 * statistics.median(s for s, _ in seconds), ratio, error, calls)

    def _calls(self) -> dict[str, Callable[[], object]]:
        sequence = dims.sequence(self._tested.dims)
        if sequence is None:
            return {"call": self._call({})}
        length = self._tested.dims[sequence].nearest(PREFILL)
        found = {f"prefill {length}": self._call({sequence: length})}
        if self._tested.states and self._tested.dims[sequence].allows(1):
            found["decode"] = self._call({sequence: 1})
        return found

    def _call(self, sizes: Mapping[str, int]) -> Callable[[], object]:
        fed = self._fed(sizes)
        return lambda: self._session.run(fed)

    def _fed(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        tested = self._tested
        every = {
            name: limits.nearest(1 if limits.batch else tested.traced[name])
            for name, limits in tested.dims.items()
        }
        case = Case("timing", {**every, **sizes}, 0)
        inputs = feeds(draw_inputs(tested.loaded, tested.input_shapes, case), tested.input_names)
        return {**inputs, **tested.initial_state(tested.batch(case.sizes))}

    def _memory(self) -> float | None:
        sequence = dims.sequence(self._tested.dims)
        sizes = {sequence: self._tested.dims[sequence].nearest(MEMORY_LENGTH)} if sequence else {}
        small = {sequence: min(8, sizes[sequence])} if sequence else {}
        with tempfile.TemporaryDirectory() as work:
            first, second = Path(work) / "inputs.npz", Path(work) / "small.npz"
            for path, chosen in ((first, sizes), (second, small)):
                save_npz(path, self._fed(chosen))
            model, target = str(self._model), self._manifest.target
            peaks = [
                peak_megabytes("onnx", model, first, second, target)[0] for _ in range(MEMORY_RUNS)
            ]
        found = [peak for peak in peaks if peak is not None]
        return statistics.median(found) if found else None


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _yardstick(threads: int, size: int = 384) -> Callable[[], object]:
    """Return a call of one matrix product in ONNX Runtime, with as many threads."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (size, size)) for n in "abc"]
    product = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([product], "yardstick", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = OrtSession(model.SerializeToString(), threads=threads, taking_turns=True)
    ones = np.ones((size, size), np.float32)
    return lambda: session.run({"a": ones, "b": ones})
