"""Interface of a target, and the session its models run in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from linexport.errors import UsageError
from linexport.manifest import Manifest
from linexport.manifest.engines import EngineRecord
from linexport.manifest.prepared import PreparedRecord
from linexport.manifest.records import InputRecord, StateRecord, TensorRecord
from linexport.plugins.cpu import library
from linexport.system import memory
from linexport.system.time_limit import watched
from linexport.system.untyped import ArrayLike
from linexport.targets.runtime.options import (
    LOGITS_FROM,
    LOGITS_TO_KEEP,
    giving_memory_back,
    session_options,
    write_profile,
)
from linexport.targets.runtime.providers import CPU, CPU_ONLY, Execution

if TYPE_CHECKING:  # help lists the targets, and answers without these
    import numpy as np
    import onnx

    from linexport.graph.dims import DimRange
    from linexport.graph.external_data import ModelSource
    from linexport.targets.lowering.choice import Candidates
    from linexport.targets.runtime.appended_caches import AppendedCaches
    from linexport.targets.runtime.device_memory import OrtMemory

log = logging.getLogger(__name__)

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Precisions by the name users choose them by."""


class InferenceSession(Protocol):
    """An opened model."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name for inputs by name."""
        ...


@runtime_checkable
class OutputWriter(Protocol):
    """A session that writes outputs where they are to be."""

    def run_into(
        self, inputs: Mapping[str, object], arrays: Mapping[str, object]
    ) -> dict[str, np.ndarray]:
        """Run with some outputs written to arrays that are there; return the others."""
        ...


@runtime_checkable
class DeviceSession(OutputWriter, Protocol):
    """A session whose arrays may stay in the memory of its device, from call to call.

    Such an array has shape, dtype and slices of its first axis as NumPy's do; ``np.asarray`` copies
    it. A state is returned where its past was.
    """

    def hold(self, arrays: Mapping[str, object]) -> dict[str, ArrayLike]:
        """Return arrays on the device; those that are there stay as they are."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: object) -> ArrayLike:
        """Return an array on the device, of any values."""
        ...

    def array(self, values: ArrayLike) -> ArrayLike:
        """Return an array of the device as it is, and any other one as NumPy's."""
        ...

    @property
    def close(self) -> Callable[[], object]:
        """Free everything on the device."""
        ...


def run_into(
    session: InferenceSession, inputs: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run a model with some outputs written to arrays that are there; return the others.

    Sessions that can write them there themselves; from others they are copied.
    """
    if isinstance(session, OutputWriter):
        return session.run_into(inputs, arrays)
    outputs = session.run(inputs)
    for name, array in arrays.items():
        array[...] = outputs.pop(name)
    return outputs


def fits_library(manifest: Manifest) -> bool:
    """Return whether the CPU library runs an artifact: it has an op for it, and takes rows."""
    return manifest.packed is None and library.computes(manifest.fused)


def uses_library(manifest: Manifest) -> bool:
    """Return whether the CPU library is to run an artifact, where one is built."""
    return manifest.trusts_library and fits_library(manifest)


def unchanged(model: onnx.ModelProto) -> onnx.ModelProto:
    """The default of ``Target.prepare``."""
    return model


@dataclass(frozen=True)
class Options:
    """Options of targets that build engines.

    Attributes:
        precision: of weights and activations, one of ``DTYPES``; states are float32, but for keys
            and values of ort-cuda in fp16.
        sms: compute capabilities to build for, such as 89; empty: the target's own choice.
        plugins: run linexport ops by plugins where there is one.
        quick: of these, prefer those that TensorRT runs by itself, without a plugin library.
        timing_cache: file of kernels' times that builds share; None: none is kept.
        packed: calls take sequences of their own lengths, side by side.
    """

    precision: str = "fp32"
    sms: tuple[int, ...] = ()
    plugins: bool = True
    quick: bool = False
    timing_cache: Path | None = None
    packed: bool = False


def check_precision(options: Options) -> None:
    """Check that a precision is known.

    Raises:
        UsageError: it is not.
    """
    if options.precision not in DTYPES:
        raise UsageError(
            f"--precision is {options.precision!r}; expected one of {', '.join(DTYPES)}."
        )


def without_options(target: Target, options: Options) -> Target:
    """The default of ``Target.configure``.

    Raises:
        UsageError: an option was given.
    """
    if options != Options():
        raise UsageError(
            "--precision, --sm, --no-plugins, --quick and --timing-cache are of targets that build "
            "engines, the first three of ort-cuda, too, and --packed-batches of that alone; found "
            f"target {target.name}."
        )
    return target


@dataclass(frozen=True)
class Converted:
    """A lowered model, written and checked, of which engines may be built.

    Attributes:
        model: its file; engines go into the same folder.
        dims: ranges of the dynamic dimensions, all bounded.
        inputs: of the model, states among them.
        outputs: of the model, states among them.
        states: what an output carries to the input of the next call.
        past: range of the rows of states that grow; None for the target's own.
        logits: the output with a language model's logits of each token; None of other models.
        text: its tokenizer as a program in C++ reads it; None without one.
    """

    model: Path
    dims: Mapping[str, DimRange]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[TensorRecord, ...]
    states: tuple[StateRecord, ...]
    past: DimRange | None = None
    logits: str | None = None
    text: bytes | None = None


Build = Callable[[Converted], list[EngineRecord]]
"""Makes engines of a converted model, and returns a record of each for the manifest."""

Assemble = Callable[[Converted], PreparedRecord]
"""Writes the files that build a converted model's engines elsewhere, and returns the record."""


@dataclass(frozen=True)
class Finishing:
    """A prepared artifact on the machine that its engine is to be built on.

    Attributes:
        folder: of the artifact.
        manifest: of it.
        timing_cache: file of kernels' times; None for the artifact's own.
        logits: see ``Converted``.
    """

    folder: Path
    manifest: Manifest
    timing_cache: Path | None = None
    logits: str | None = None


Finish = Callable[[Finishing], EngineRecord]
"""Builds the engine for the GPU of this machine into a prepared artifact."""


class Deploy(Protocol):
    """Opens the engine of an artifact."""

    def __call__(self, folder: Path, manifest: Manifest, device: int = 0, /) -> InferenceSession:
        """Open it on the GPU with index ``device``."""
        ...


@dataclass(frozen=True)
class Target:
    """Where an artifact runs.

    Attributes:
        name: as users choose it.
        candidates: lowerings of each op that are correct there, best first.
        open: opens the ONNX model, from its file or what was read of it, for running here; its
            keywords are those of ``OrtSession``.
        prepare: changes the graph before its ops are lowered.
        configure: the target with the user's options applied to it.
        bound: narrows the ranges of dynamic dimensions to what an engine can be built for.
        written: changes the lowered graph before it is written.
        build: makes engines; None where the ONNX model is all there is.
        assemble: prepares engines that are built on other machines; None where none is.
        finish: builds one of these; None where none can be.
        deploy: opens an engine; None where ``build`` is.
        options: those applied.
    """

    name: str
    candidates: Candidates
    open: Callable[..., InferenceSession]
    prepare: Callable[[onnx.ModelProto], onnx.ModelProto] = unchanged
    configure: Callable[[Target, Options], Target] = without_options
    bound: Callable[[Mapping[str, DimRange]], dict[str, DimRange]] = dict
    written: Callable[[onnx.ModelProto], onnx.ModelProto] = unchanged
    build: Build | None = None
    assemble: Assemble | None = None
    finish: Finish | None = None
    deploy: Deploy | None = None
    options: Options = Options()


class OrtSession:
    """A model in ONNX Runtime.

    Args:
        model: a file, a serialised model, or a file that was read.
        threads: number of threads, 0 for ONNX Runtime's choice.
        taking_turns: threads sleep when a call ends. By default they spin for a while in wait of
            the next call, and so slow other sessions that take turns with this one: on two cores,
            2.5 ms become 17.
        execution: the execution provider that runs it. Any but the CPU's leaves the CPU library
            aside; CUDA's runs nodes that carry kernels by the CUDA library, where it is built and
            they are for this GPU.
        low_memory: take less memory and more time, and give the memory of a call's values back.
        native: run linexport ops by the CPU library, where it is built and runs all of the model's;
            otherwise, as by default, by the functions that their nodes carry.
        settings: of ONNX Runtime's session configuration, by name.
        profile: a folder for a profile of what is run, and for ``optimized.onnx``, the graph of it.
        logits: the output of a language model that the CPU computes for the last tokens alone where
            an input ``logits_to_keep`` says so; see ``kept_logits``.

    Attributes:
        native: whether a library of ours runs them.
        placement: what the execution provider runs; None for the CPU.
        memory: of the execution provider's device; None for the CPU.
        keeps_logits: whether ``logits_to_keep`` may be among the inputs of a call.

    Raises:
        EnvironmentProblemError: see ``placement.open_placed``.
        onnxruntime exceptions: the model does not load on the CPU.
    """

    def __init__(
        self,
        model: ModelSource,
        threads: int = 0,
        taking_turns: bool = False,
        execution: Execution = CPU_ONLY,
        low_memory: bool = False,
        native: bool = False,
        settings: Mapping[str, str] | None = None,
        profile: Path | None = None,
        logits: str | None = None,
    ) -> None:
        from linexport.targets.runtime import opening as ort_opening

        def options() -> Any:
            made = session_options(threads, taking_turns, low_memory)
            for name, value in (settings or {}).items():
                made.add_session_config_entry(name, value)
            if profile is not None:
                write_profile(made, profile)
            return made

        found = ort_opening.opened(model, options, threads, execution, native, logits)
        self.inner, self.native, self.placement = found.inner, found.native, found.placement
        self._low_memory = low_memory and execution.provider == CPU
        self.memory: OrtMemory | None = None
        if execution.provider != CPU:
            from linexport.targets.runtime.device_memory import OrtMemory

            self.memory = OrtMemory(self.inner, found.captures)
        self._caches: AppendedCaches | None = None
        if found.caches is not None:
            from linexport.targets.runtime.appended_caches import AppendedCaches

            self._caches = AppendedCaches(self._on_host(), found.caches)
        memory.trim_memory()
        self.output_names = [o.name for o in self.inner.get_outputs()]
        self.keeps_logits = any(i.name == LOGITS_FROM for i in self.inner.get_inputs())

    def run(self, inputs: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
        """See ``InferenceSession``; states that are on a device stay there."""
        complete = self._complete(inputs)
        bound = self._caches or self.memory
        if bound is not None:
            return bound.run(complete, {})
        with watched(giving_memory_back() if self._low_memory else None) as options:
            values = self.inner.run(None, complete, options)
        return dict(zip(self.output_names, values, strict=True))

    def run_into(
        self, inputs: Mapping[str, object], arrays: Mapping[str, object]
    ) -> dict[str, object]:
        """Run the model with some outputs written to arrays that are there; return the others."""
        bound = self._caches or self.memory or self._on_host()
        return bound.run(self._complete(inputs), arrays)

    def _on_host(self) -> OrtMemory:
        from linexport.targets.runtime.device_memory import OrtMemory

        return OrtMemory(self.inner, gives_back=self._low_memory)

    def _complete(self, inputs: Mapping[str, ArrayLike]) -> Mapping[str, ArrayLike]:
        """Return the inputs of the graph, with where logits begin; all where no number is given."""
        import numpy as np

        if not self.keeps_logits:
            return inputs
        kept = np.asarray(inputs.get(LOGITS_TO_KEEP, 0), np.int64).reshape(1)
        others = {name: value for name, value in inputs.items() if name != LOGITS_TO_KEEP}
        return {**others, LOGITS_FROM: -kept}

    def hold(self, arrays: Mapping[str, object]) -> dict[str, ArrayLike]:
        """See ``DeviceSession``; on ONNX Runtime's CPU provider arrays stay as they are."""
        return dict(arrays) if self.memory is None else self.memory.hold(arrays)

    def empty(self, shape: tuple[int, ...], dtype: object) -> ArrayLike:
        """See ``DeviceSession``."""
        import numpy as np

        return np.empty(shape, dtype) if self.memory is None else self.memory.empty(shape, dtype)

    def array(self, values: ArrayLike) -> ArrayLike:
        """See ``DeviceSession``."""
        import numpy as np

        return np.asarray(values)

    def close(self) -> None:
        """Do nothing: memory is given back when nobody holds it."""
