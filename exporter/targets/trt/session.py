"""An engine opened on a GPU: checked before it is deserialised, bound by name, run by shape.

What can be known without a GPU is refused without one: a damaged file, another version of the
library, sizes beyond the profiles. Tensors stay where they are:

    past state on the GPU   ->  present state on the GPU, in memory that nobody holds
    inputs on the GPU       ->  outputs on the GPU
    inputs of the host      ->  outputs of the host, through memory that is taken once

A stream's states so alternate between two places, and a step copies its tokens and its logits.

The engine of a language model computes the logits of tokens whose places it is given. Where more
are read than its profile has room for, it is run several times on the same inputs.
"""

from __future__ import annotations

import hashlib
import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import Manifest
from linexport.manifest.engines import EngineRecord
from linexport.manifest.records import named
from linexport.plugins.tensorrt.flavour import FLAVOURS, Flavour
from linexport.system.untyped import ArrayLike
from linexport.targets.runtime.device_array import DeviceArray, DeviceBlock, is_on_device
from linexport.targets.runtime.options import LOGITS_AT, LOGITS_TO_KEEP
from linexport.targets.trt.device import Device
from linexport.targets.trt.engine import OpenedEngine
from linexport.targets.trt.graphs import Graphs
from linexport.targets.trt.profiles import Profile

WARMUP, REPEATS = 4, 20
"""Calls that are not timed, by when a repeated one is replayed from a graph, and calls that are."""


def read_engine(folder: Path, record: EngineRecord, flavour: Flavour) -> bytes:
    """Return the content of an engine file, once it is what its record says.

    Raises:
        UsageError: it is missing, or damaged.
        EnvironmentProblemError: the library is missing, or of another version.
    """
    path = folder / record.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Convert again.") from None
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise UsageError(
            f"{path} is not the engine its manifest describes: it was changed, or only half of it "
            f"was written ({len(content)} bytes). Convert the model again."
        )
    if flavour.version() != record.version:
        raise EnvironmentProblemError(
            f"{path} was built by {flavour.title} {record.version}; installed is "
            f"{flavour.version()}. Engines run in the version that built them: install that one, "
            "or convert the model again."
        )
    return content


def choose(records: Sequence[EngineRecord], sm: int, owner: Path, flavour: Flavour) -> EngineRecord:
    """The engine for a GPU of compute capability ``sm``.

    Raises:
        EnvironmentProblemError: there is none.
    """
    found = next((record for record in records if record.sm == sm), None)
    if found is None:
        built = ", ".join(f"{record.sm / 10:.1f}" for record in records) or "none"
        advice = f"Convert the model with --sm {sm}."
        if flavour.sms and sm not in flavour.sms:
            advice = (
                f"{flavour.title} has none for such a GPU. Convert the model with --target "
                f"tensorrt or ort-cuda, and --sm {sm}."
            )
        raise EnvironmentProblemError(
            f"{owner} has engines for compute capability {built}; this GPU has {sm / 10:.1f}. "
            + advice
        )
    return found


def sizes_of(
    shapes: Mapping[str, Sequence[int | str]], inputs: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Sizes of the named dimensions in a call.

    Raises:
        UsageError: an input is missing, unknown, or of another shape.
    """
    if set(inputs) != set(shapes):
        raise UsageError(f"Found the inputs {sorted(inputs)}; expected {sorted(shapes)}.")
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        found = inputs[name].shape
        fits = len(found) == len(shape) and all(
            size == (sizes.setdefault(d, size) if isinstance(d, str) else d)
            for size, d in zip(found, shape, strict=True)
        )
        if not fits:
            raise UsageError(f"{name} has shape {found}; expected {tuple(shape)} with {sizes}.")
    return sizes


def profile_for(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """The last profile a call falls into: later ones are narrower.

    Raises:
        UsageError: it falls into none.
    """
    able = [i for i, profile in enumerate(profiles) if profile.takes(sizes)]
    if not able:
        known = "; ".join(
            ", ".join(f"{n} {d[0]} to {d[2]}" for n, d in profile.dims.items() if n in sizes)
            for profile in profiles
        )
        raise UsageError(
            f"Sizes {dict(sizes)} are beyond the engine's profiles ({known}). Convert the model "
            "with --dim NAME=MIN:OPT:MAX."
        )
    return able[-1]


def places(shape: Sequence[int], kept: int, most: int) -> list[np.ndarray]:
    """Return the places of the tokens whose logits are read, int64 (rows, n), for each run.

    Args:
        shape: rows and tokens of a call.
        kept: last tokens of each row, 0 for all.
        most: of them in one run.
    """
    rows, tokens = shape
    first = max(0, tokens - kept) if kept else 0
    return [
        np.tile(np.arange(start, min(start + most, tokens)), (rows, 1))
        for start in range(first, tokens, most)
    ]


class EngineSession:
    """An engine on a GPU of this machine; see ``targets.base.InferenceSession``.

    Any thread may call it; calls follow each other.

    Args:
        folder: of the artifact.
        manifest: of the artifact.
        device: index of the GPU.

    Attributes:
        record: what the manifest says of it.
        keeps_logits: whether ``logits_to_keep`` may be among the inputs of a call.

    Raises:
        UsageError, EnvironmentProblemError: see ``read_engine``, ``choose``, ``Device`` and
            ``OpenedEngine``.
    """

    def __init__(self, folder: Path, manifest: Manifest, device: int = 0) -> None:
        flavour = FLAVOURS[manifest.target]
        if manifest.not_built and not manifest.engines:
            raise EnvironmentProblemError(
                f"{folder} is {manifest.not_built}. Build it on the machine of the GPU: linexport "
                f"build {folder.name}. Its ONNX model runs here: linexport.load(..., engine=False)."
            )
        contents = {r.file: read_engine(folder, r, flavour) for r in manifest.engines}
        self.device = Device(device)
        try:
            self.record = choose(manifest.engines, self.device.sm, folder, flavour)
            with self.device.current():
                content = contents[self.record.file]
                self.engine = OpenedEngine(flavour, content, self.record, self.device)
        except BaseException:
            self.device.close()
            raise
        self.profiles = [Profile(p.name, p.dims) for p in self.record.profiles]
        self.shapes = {i.name: named(i.shape) for i in manifest.inputs}
        self.pasts = {s.present: s.past for s in manifest.states}
        self.keeps_logits = self.record.logits is not None
        states = {manifest.hidden, *self.pasts.values()}
        given = (i.name for i in manifest.inputs if i.name not in states and i.default is None)
        self._tokens = next(given, "")
        self._held = np.empty((0, 0), np.int64)
        self.in_place = set(self.record.in_place)
        self.graphs = Graphs(self.device)
        self.graphs.enabled = self.engine.captures
        self._blocks: dict[str, tuple[int, DeviceBlock]] = {}
        self.close = weakref.finalize(self, _close, self.device, self.engine, self.graphs)

    def run(self, inputs: Mapping[str, ArrayLike], in_place: bool = False) -> dict[str, ArrayLike]:
        """Return the outputs by name.

        ``in_place`` gives present states the memory of their pasts, where their kernels allow it;
        these are then lost.

        Raises:
            UsageError: see ``sizes_of`` and ``profile_for``.
            EnvironmentProblemError: the GPU reports an error.
        """
        return self.run_into(inputs, {}, in_place)

    def run_into(
        self, inputs: Mapping[str, object], arrays: Mapping[str, object], in_place: bool = False
    ) -> dict[str, ArrayLike]:
        """Run the engine with some outputs written to arrays on the GPU; return the others.

        Arguments and errors are those of ``run``.
        """
        if not self.close.alive:
            raise UsageError("The artifact was closed. Load it again.")
        with self.device.current():
            if self.record.logits is None:
                return _EngineCall(self, inputs, arrays, in_place).run()
            return self._run_keeping(self.record.logits, inputs, arrays, in_place)

    def _run_keeping(
        self,
        logits: str,
        inputs: Mapping[str, ArrayLike],
        arrays: Mapping[str, ArrayLike],
        in_place: bool,
    ) -> dict[str, ArrayLike]:
        """Run the engine for the logits that are read, several times where they are too many.

        Each run but the last is for its logits alone: it leaves the states as they are.
        """
        given = {name: x for name, x in inputs.items() if name != LOGITS_TO_KEEP}
        profile = self.profiles[profile_for(self.profiles, sizes_of(self.shapes, given))]
        kept = int(inputs.get(LOGITS_TO_KEEP, [0])[0])
        *before, last = places(given[self._tokens].shape, kept, profile.dims[LOGITS_TO_KEEP][2])
        parts = [
            np.asarray(_EngineCall(self, {**given, LOGITS_AT: part}, {}, False).run()[logits])
            for part in before
        ]
        outputs = _EngineCall(self, {**given, LOGITS_AT: last}, arrays, in_place).run()
        if parts:
            whole = np.concatenate([*parts, np.asarray(outputs[logits])], 1)
            there = isinstance(outputs[logits], DeviceArray)
            outputs[logits] = DeviceArray.of(self.device, whole) if there else whole
        return outputs

    def hold(self, arrays: Mapping[str, object]) -> dict[str, ArrayLike]:
        """Return arrays on the GPU; those that are there stay as they are."""
        with self.device.current():
            return {
                name: x if isinstance(x, DeviceArray) else DeviceArray.of(self.device, x)
                for name, x in arrays.items()
            }

    def empty(self, shape: tuple[int, ...], dtype: object) -> DeviceArray:
        """Return an array on the GPU whose values nobody has written."""
        with self.device.current():
            return DeviceArray(self.device, shape, dtype)

    def array(self, values: ArrayLike) -> ArrayLike:
        """Return an array of the GPU in its memory, and any other one as NumPy's.

        Raises:
            UsageError: see ``DeviceArray.wrap``.
        """
        if is_on_device(values, self.device.kind):
            return DeviceArray.wrap(self.device, values)
        return np.asarray(values)

    def time(self, inputs: Mapping[str, np.ndarray]) -> dict[str, ArrayLike]:
        """Return milliseconds of a step as ``generate`` makes it: launched, and replayed.

        States are on the GPU and go from call to call; the other inputs come from the host, and the
        outputs go there. ``graph_ms`` is None where calls are not captured.
        """
        pasts = self.hold({n: inputs[n] for n in self.pasts.values()})
        given = {n: x for n, x in inputs.items() if n not in pasts}
        if self.keeps_logits:
            given[LOGITS_TO_KEEP] = np.array([1])
        enabled = self.graphs.enabled
        try:
            self.graphs.enabled = False
            launched = self._timed(given, pasts)
            self.graphs.enabled = enabled
            replayed = self._timed(given, pasts) if enabled else None
        finally:
            self.graphs.enabled = enabled
        problem = self.graphs.problem
        if not enabled:
            problem = "TensorRT-RTX captures its own"
        return {
            "launched_ms": launched,
            "graph_ms": None if problem else replayed,
            "graph_problem": problem,
        }

    def _timed(self, given: Mapping[str, object], pasts: Mapping[str, object]) -> float:
        times = []
        for repeat in range(WARMUP + REPEATS):
            start = time.perf_counter()
            outputs = self.run({**given, **pasts})
            if repeat >= WARMUP:
                times.append(1000 * (time.perf_counter() - start))
            pasts = {past: outputs[present] for present, past in self.pasts.items()}
        return round(statistics.median(times), 4)

    def place(self, name: str, size: int) -> int:
        """Return the address of an input or output of the host; the same one for a size or less."""
        held, block = self._blocks.get(name, (-1, None))
        if block is None or held < size:
            self._blocks.pop(name, None)
            self._blocks[name] = size, (block := DeviceBlock(self.device, size))
        return block.address

    def are_others(self, values: np.ndarray) -> bool:
        """Return whether tokens' places differ from those on the device, and note the new ones.

        Those of a step of one token are always the same.
        """
        held, self._held = self._held, values
        return not np.array_equal(held, values)


def _close(device: Device, engine: OpenedEngine, graphs: Graphs) -> None:
    with device.current():
        graphs.close()
        engine.close()
    device.close()


class _EngineCall:
    """Where the tensors of one call are."""

    def __init__(
        self,
        session: EngineSession,
        inputs: Mapping[str, ArrayLike],
        arrays: Mapping[str, ArrayLike],
        in_place: bool,
    ) -> None:
        self.session, self.device, self.engine = session, session.device, session.engine
        sizes = sizes_of(session.shapes, {n: x for n, x in inputs.items() if n != LOGITS_AT})
        self.profile = profile_for(session.profiles, sizes)
        self.context = self.engine.contexts[self.profile]
        self.inputs = {n: self._typed(n, inputs[n]) for n in self.engine.inputs}
        self.arrays, self.in_place = arrays, in_place
        self.places: dict[str, int] = {}
        self.outputs: dict[str, ArrayLike] = {}
        self.kept: list[Any] = []

    def run(self) -> dict[str, ArrayLike]:
        """Bind, launch and wait; return the outputs that have no array of their own yet."""
        for name, values in self.inputs.items():
            self.context.set_input_shape(name, tuple(values.shape))
            self.places[name] = self._input(name, values)
        given = {*self.session.pasts.values(), LOGITS_AT}
        on_device = any(
            isinstance(x, DeviceArray) for n, x in self.inputs.items() if n not in given
        )
        for name in self.engine.outputs:
            if name in self.engine.host:
                shape = tuple(self.context.get_tensor_shape(name))
                self.outputs[name] = np.empty(shape, self.engine.dtypes[name])
                self.places[name] = int(self.outputs[name].ctypes.data)
            else:
                self.places[name] = self._output(name, on_device)
        for name, address in self.places.items():
            self.context.set_tensor_address(name, address)
        shapes = tuple(tuple(x.shape) for x in self.inputs.values())
        if self.engine.host:  # what they hold is part of the plan of a call
            self._enqueue()
        else:
            key = self.profile, shapes, tuple(self.places.values())
            self.session.graphs.run(key, self._enqueue)
        for name, values in self.outputs.items():
            if isinstance(values, np.ndarray) and name not in self.engine.host:
                self.device.read(self.places[name], values)
        self.device.wait()
        return {n: x for n, x in self.outputs.items() if n not in self.arrays}

    def _input(self, name: str, values: np.ndarray) -> int:
        """Return the address of an input, once its values are on their way there."""
        if name in self.engine.host:
            self.kept.append(np.ascontiguousarray(values))
            return int(self.kept[-1].ctypes.data)
        if isinstance(values, DeviceArray):
            return values.address
        address = self.session.place(name, values.nbytes)
        if name != LOGITS_AT or self.session.are_others(values):
            self.device.write(address, values)
        return address

    def _output(self, name: str, on_device: bool) -> int:
        """Return the address of an output, and note the array that it is found in."""
        shape = tuple(self.context.get_tensor_shape(name))
        dtype, found = self.engine.dtypes[name], self.arrays.get(name)
        size = prod(shape) * dtype.itemsize
        past = self.session.pasts.get(name, "")
        before = self.inputs.get(past)
        on_gpu = isinstance(before, DeviceArray) if past else on_device
        if self._overwrites(name, before, size):
            address = self.places[past]
            if on_gpu:
                found = DeviceArray(self.device, shape, dtype, before, address)
        else:
            if found is None and on_gpu:
                found = DeviceArray(self.device, shape, dtype)
            if isinstance(found, DeviceArray):
                address = found.address
            else:
                address = self.session.place(name, size)
        self.outputs[name] = np.empty(shape, dtype) if found is None else found
        return address

    def _overwrites(self, name: str, before: ArrayLike, size: int) -> bool:
        able = self.in_place and name in self.session.in_place and before is not None
        return bool(able and before.nbytes == size)

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(self.device.stream):
            raise EnvironmentProblemError(
                f"The engine does not run: {'; '.join(self.engine.log.errors()[-2:])}"
            )

    def _typed(self, name: str, values: np.ndarray) -> Any:
        expected = self.engine.dtypes[name]
        if values.dtype != expected:
            raise UsageError(f"{name} has dtype {values.dtype}; the engine takes {expected}.")
        return values
