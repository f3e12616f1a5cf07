"""Models that are changed and opened while weights are chosen.

The float32 model is read once, one weight at a time. Its large values are memory-mapped, outside
of the graph: a changed graph costs no copy of them until it is written to a file, which ONNX
Runtime maps into memory. What is not in use is not open.

A model in half precision is computed with in float32 as well: values are chosen, and the result is
compared, by its own weights and with nothing else rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from linexport import manifest as manifests
from linexport import targets
from linexport.artifact.checked import CheckedArtifact
from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run, open_written, runs
from linexport.artifact.text.language_interface import logits_of
from linexport.errors import ParityError
from linexport.graph import external_data
from linexport.graph.dims import parse
from linexport.graph.outputs import with_outputs
from linexport.quantization.half import HalfModel
from linexport.quantization.quantisable import floating_weights
from linexport.quantization.rewrite import float_activations
from linexport.sources.onnx_file.index_ranges import index_range
from linexport.system import memory
from linexport.targets.base import uses_library
from linexport.targets.lowering.kept_logits import with_logits_at
from linexport.targets.lowering.split_head import find_stretch, keep_decoder
from linexport.targets.runtime.options import FLOAT_PRODUCTS, changed_graph
from linexport.targets.runtime.providers import CPU_ONLY, Execution

COLUMNS = 512
"""Rows of a sum of products that are added at once."""

ROWS, ROWS_BYTES = 2048, 2**25
"""Rows of a value, and bytes of them, from which their products are summed."""


@dataclass(frozen=True)
class FloatModel:
    """An artifact that is not quantised, with its graph.

    Attributes:
        artifact: opened, for its outputs and the inputs of its graph.
        graph: the model in float32, without the values of its matrices.
        values: of the matrices in float32, by initializer.
        threads: of every session, 0 for ONNX Runtime's choice.
        half: the model as it is deployed, in half precision, with the nodes of ``graph`` in the
            same places; None where it is in float32.
    """

    artifact: Artifact
    graph: onnx.ModelProto
    values: dict[str, NDArray]
    threads: int
    half: HalfModel | None = None

    @classmethod
    def of(cls, artifact: Artifact, model: Path, threads: int) -> FloatModel:
        """Read the model file of an artifact."""
        graph, external = external_data.read_mapped(model)
        values = {}
        weights = {t.name for t in floating_weights(graph)}
        for tensor in graph.graph.initializer:
            if tensor.name in weights:
                own = external.get(tensor.name)
                values[tensor.name] = numpy_helper.to_array(tensor) if own is None else own
                tensor.CopyFrom(
                    external_data.external_initializer(tensor.name, values[tensor.name])
                )
            elif tensor.name in external:
                tensor.CopyFrom(numpy_helper.from_array(external[tensor.name], tensor.name))
        from linexport.targets.trt.precision import ELEMENTS, widen  # a CPU needs none of it

        lower = ELEMENTS.get(artifact.manifest.precision)
        if lower is None:
            return cls(artifact, graph, values, threads)
        half = onnx.ModelProto()
        half.CopyFrom(graph)
        widen(graph, lower)
        return cls(artifact, graph, _in_float32(values), threads, HalfModel(half, values))

    @property
    def written(self) -> onnx.ModelProto:
        """The graph as it is deployed, without the values of its matrices."""
        return self.graph if self.half is None else self.half.graph

    @property
    def stored(self) -> dict[str, NDArray]:
        """Values of the matrices as they are deployed, by initializer."""
        return self.values if self.half is None else self.half.values

    def type_of(self, name: str) -> str:
        """Return the type of a matrix as it is deployed."""
        return str(self.stored[name].dtype)

    def run(self, model: onnx.ModelProto, logits: str | None = None) -> Run:
        """Open a changed graph; matrices it still has get their float32 values.

        States in half precision may be given to it as they are.
        """
        run = open_written(model, self.values, self.threads, logits=logits)
        return run if self.half is None else lambda feeds: run(_widened(feeds))

    def deployed(self, model: onnx.ModelProto, values: Mapping[str, NDArray] | None = None) -> Run:
        """Open a changed ``written`` as ``open_deployed`` does; ``values``: of new matrices."""
        manifest = self.artifact.manifest
        return open_written(
            model,
            {**self.stored, **(values or {})},
            self.threads,
            low_memory=False,
            target=manifest.target,
            logits=logits_of(manifest),
            native=uses_library(manifest),
        )

    def reference(self) -> tuple[Run, str]:
        """Return the model that a quantised one is compared with, and what it is in words."""
        if self.half is None:
            return self.artifact.run_graph, "the float32 artifact"
        name = f"the {self.artifact.manifest.precision} artifact, computed in float32"
        return self.run(self.graph, logits_of(self.artifact.manifest)), name

    def open_at_positions(self, logits: str) -> Run | None:
        """Open the float32 artifact to compute logits at positions, an input ``LOGITS_AT`` (B, n).

        None of an artifact in half precision, or whose head is not found.
        """
        path = self.artifact.path / manifests.MODEL
        source = changed_graph(path, partial(with_logits_at, output=logits))[0]
        if self.half is not None or source is path:
            return None
        target = targets.find_target(self.artifact.manifest.target)
        session = target.open(source, threads=self.threads, taking_turns=True, low_memory=True)
        return runs(session)

    def fed(self, names: Collection[str]) -> onnx.ModelProto:
        """Return the graph with the named matrices as inputs, so that values can be tried."""
        model = onnx.ModelProto()
        model.CopyFrom(self.graph)
        left = [t for t in model.graph.initializer if t.name not in names]
        del model.graph.initializer[:]
        model.graph.initializer.extend(left)
        model.graph.input.extend(
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(self.values[name].dtype),
                self.values[name].shape,
            )
            for name in names
        )
        return model


def _in_float32(values: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return values in float32, memory-mapped, one at a time."""
    wide: dict[str, NDArray] = {}
    for name, value in values.items():
        [wide[name]] = memory.memory_mapped([value.astype(np.float32)])
        memory.trim_memory()
    return wide


def _widened(feeds: Arrays) -> dict[str, NDArray]:
    return {n: v.astype(np.float32) if v.dtype == np.float16 else v for n, v in feeds.items()}


def open_deployed(
    path: Path, manifest: manifests.Manifest, threads: int, execution: Execution = CPU_ONLY
) -> targets.InferenceSession:
    """Open a quantised model with the kernels that it is deployed with.

    With little memory ONNX Runtime does not pack weights, and then it does not round activations.
    """
    return targets.find_target(manifest.target).open(
        path,
        threads=threads,
        taking_turns=True,
        native=uses_library(manifest),
        execution=execution,
        logits=logits_of(manifest),
    )


def open_exactly(path: Path, threads: int, logits: str | None = None) -> Run:
    """Open a quantised model with activations in float32.

    Args:
        path: of the model.
        threads: 0 for ONNX Runtime's choice.
        logits: an output in whose place hidden states are given, where the model can be split
            there: a head of many words is most of the time, and works on each token alone.
    """
    model, values = external_data.read_mapped(path)
    exact = float_activations(model)
    if logits is not None and find_stretch(exact, logits) is not None:
        keep_decoder(exact, logits)
    return open_written(exact, values, threads, FLOAT_PRODUCTS)


def beyond_profiles(manifest: manifests.Manifest) -> manifests.Manifest:
    """Return a manifest of the ONNX model alone, which takes more tokens than an engine's profile.

    A stream of an engine is as long as that of its ONNX model, in more calls.
    """
    if targets.find_target(manifest.target).deploy is None or manifest.options is None:
        return manifest
    from linexport.targets.trt import profiles

    named = parse(manifest.options.dims).keys()
    dims = {
        name: replace(d, max=None)
        if not d.batch and (name in named or d.max == profiles.LENGTH.max)
        else d
        for name, d in manifest.dims.items()
    }
    return replace(manifest, dims=dims)


class OnDemand:
    """A session of a model file that is opened when it is first run, and may be closed.

    Args:
        model: the file.
        target: of the artifact that it is in.
        threads: 0 for ONNX Runtime's choice.
        logits: see ``runs``.
    """

    def __init__(self, model: Path, target: str, threads: int, logits: str | None = None) -> None:
        self._model, self._target, self._threads, self._logits = model, target, threads, logits
        self._run: Run | None = None

    def run(self, inputs: Arrays) -> dict[str, NDArray]:
        """See ``InferenceSession``; ``logits_to_keep`` may be among the inputs."""
        if self._run is None:
            opened = targets.find_target(self._target).open(
                self._model,
                threads=self._threads,
                taking_turns=True,
                low_memory=True,  # the quantised model is open at the same time
                logits=self._logits,
            )
            self._run = runs(opened)
        return self._run(inputs)


def unopened(checked: CheckedArtifact, threads: int) -> Artifact:
    """Return an artifact that is opened when it is first run.

    Raises:
        ParityError: it failed a check.
    """
    folder, manifest = checked.folder, checked.manifest
    if manifest.status != "ok":
        raise ParityError(f"{folder} {manifest.failure}; see {folder / manifests.REPORT}.")
    manifest = beyond_profiles(manifest)
    ranges = {i.name: index_range(checked.graph, i.name) for i in manifest.inputs}
    return Artifact(
        folder,
        manifest,
        OnDemand(folder / manifests.MODEL, manifest.target, threads, logits_of(manifest)),
        ranges={name: values for name, values in ranges.items() if values},
        options={"verify": True, "threads": threads},
    )


class SecondMoments:
    """Sums of x y^T (N, K), float64, of values x and y with N and K channels in their last axis.

    Products of some rows are in float32, which is twice as fast: ``ROWS`` terms lose 1e-6 of their
    sum, and the damping of moments is 1e-2 of their mean. Sums are in memory-mapped files, as there
    is one of K^2 numbers for every product, and are read and written once for all these rows.
    """

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, int] = {}
        self._halves: set[str] = set()
        self._left: dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = {}

    def add(self, name: str, value: NDArray, other: NDArray | None = None) -> None:
        """Add the rows of one value (..., N), kept as they are; y is x without another value."""
        rows, others = (_rows(one) for one in (value, value if other is None else other))
        outputs, width = rows.shape[-1], others.shape[-1]
        if name not in self._sums:
            [block] = memory.blocks([8 * outputs * width])
            self._sums[name] = block.view(np.float64).reshape(outputs, width)
            self._counts[name] = 0
            if other is None:  # symmetric: what is right of the diagonal is summed
                self._halves.add(name)
        left = self._left.setdefault(name, [])
        left.append((rows, others))
        self._counts[name] += len(rows)
        count = sum(len(own) for own, _ in left)
        if count >= ROWS or 4 * count * width >= ROWS_BYTES:
            self._sum(name)

    def _sum(self, name: str) -> None:
        """Add the rows that are left."""
        own, pairs = self._sums[name], self._left.pop(name, [])
        if not pairs:
            return
        rows = np.concatenate([rows for rows, _ in pairs])
        halves = name in self._halves
        others = rows if halves else np.concatenate([others for _, others in pairs])
        for start in range(0, len(own), COLUMNS):
            first = start if halves else 0
            own[start : start + COLUMNS, first:] += (
                rows[:, start : start + COLUMNS].T @ others[:, first:]
            )
        memory.release(own.ctypes.data, own.nbytes)

    def means(self) -> dict[str, NDArray[np.float64]]:
        """Return E[x y^T] by name; nothing may be added afterwards."""
        for name, own in self._sums.items():
            self._sum(name)
            own /= self._counts[name]
            for start in range(0, len(own), COLUMNS) if name in self._halves else ():
                end = start + COLUMNS
                own[end:, start:end] = own[start:end, end:].T
            memory.release(own.ctypes.data, own.nbytes)
        return self._sums


def _rows(value: NDArray) -> NDArray[np.float32]:
    """Return a value (..., K) as rows (n, K), float32."""
    return value.reshape(-1, value.shape[-1]).astype(np.float32, copy=False)


def second_moments(
    model: FloatModel, names: Collection[str], data: Collection[Arrays]
) -> dict[str, NDArray[np.float64]]:
    """Measure E[x x^T] (K, K), float64, of values x with K channels in their last axis.

    Args:
        model: run on the data.
        names: values of the graph.
        data: inputs of the graph for each run, states included.
    """
    run = model.run(with_outputs(model.graph, names))
    found = SecondMoments()
    for feeds in data:
        for name, value in run(feeds).items():
            found.add(name, value)
    return found.means()


def smallest(model: FloatModel, names: Collection[str], feeds: Arrays) -> dict[str, float]:
    """Return the smallest number in each of the named values, for one input."""
    return {
        n: float(v.min()) for n, v in model.run(with_outputs(model.graph, names))(feeds).items()
    }
