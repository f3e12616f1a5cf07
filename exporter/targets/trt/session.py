"""An engine opened on a GPU: checked before it is deserialised, bound by name, run by shape.

What can be known without a GPU is refused without one: a damaged file, another version of the
library, sizes beyond the profiles. A state of a call and that of the next may share memory where
the plan of the kernels says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import Manifest
from linexport.manifest.engines import EngineRecord
from linexport.manifest.records import named
from linexport.plugins.tensorrt.flavour import FLAVOURS, Flavour
from linexport.plugins.tensorrt.plugin import register
from linexport.targets.trt.device import Device
from linexport.targets.trt.log import Log
from linexport.targets.trt.profiles import Profile

ARRAYS = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


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


def choose(records: Sequence[EngineRecord], sm: int, owner: Path) -> EngineRecord:
    """The engine for a GPU of compute capability ``sm``.

    Raises:
        EnvironmentProblemError: there is none.
    """
    found = next((record for record in records if record.sm == sm), None)
    if found is None:
        built = ", ".join(f"{record.sm / 10:.1f}" for record in records) or "none"
        raise EnvironmentProblemError(
            f"{owner} has engines for compute capability {built}; this GPU has {sm / 10:.1f}. "
            f"Convert the model with --sm {sm}."
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
            ", ".join(f"{n} {low} to {high}" for n, (low, _, high) in profile.dims.items())
            for profile in profiles
        )
        raise UsageError(
            f"Sizes {dict(sizes)} are beyond the engine's profiles ({known}). Convert the model "
            "with --dim NAME=MIN:OPT:MAX."
        )
    return able[-1]


class EngineSession:
    """An engine on this machine's GPU; see ``targets.base.InferenceSession``.

    Attributes:
        record: what the manifest says of it.

    Raises:
        UsageError, EnvironmentProblemError: see ``verify``, ``choose`` and ``Device``.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        flavour = FLAVOURS[manifest.target]
        for record in manifest.engines:
            read_engine(folder, record, flavour)
        self.device = Device()
        self.record = choose(manifest.engines, self.device.sm, folder)
        self.profiles = [Profile(p.name, p.dims) for p in self.record.profiles]
        self.shapes = {i.name: named(i.shape) for i in manifest.inputs}
        able = self.record.in_place
        self.pairs = {s.present: s.past for s in manifest.states if s.present in able}
        self._open(flavour, read_engine(folder, self.record, flavour))

    def _open(self, flavour: Flavour, content: bytes) -> None:
        module = flavour.load()
        creators = register(flavour) if self.record.plugin_library else ()
        self.log = Log()
        self.runtime = module.Runtime(self.log.sink(module))
        self.engine = self.runtime.deserialize_cuda_engine(content)
        if self.engine is None:
            failures = [str(c.failure) for c in creators if c.failure]
            reason = "; ".join([*failures, *self.log.errors()][:2]) or "it gives no reason"
            raise EnvironmentProblemError(
                f"{flavour.title} cannot open {self.record.file}: {reason}"
            )
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        mode = module.TensorIOMode.INPUT
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == mode]
        self.outputs = [n for n in names if n not in self.inputs]
        self.contexts = [self._context(i) for i in range(len(self.profiles))]

    def _context(self, profile: int) -> Any:
        context = self.engine.create_execution_context()
        if context is None:
            raise EnvironmentProblemError(
                "TensorRT has no memory for an execution context: "
                + "; ".join(self.log.errors()[:2])
            )
        context.set_optimization_profile_async(profile, int(self.device.stream))
        self.device.wait()
        return context

    def run(
        self, inputs: Mapping[str, np.ndarray], in_place: bool = False
    ) -> dict[str, np.ndarray]:
        """Return the outputs by name.

        ``in_place`` gives present states the memory of their pasts, where their kernels allow it.

        Raises:
            UsageError: see ``sizes_of`` and ``profile_for``.
            EnvironmentProblemError: the GPU reports an error.
        """
        with _EngineCall(self, inputs, in_place) as call:
            call.enqueue()
            self.device.wait()
            return call.results()

    def time(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Milliseconds of a call with its data on the GPU, states in place; see ``Device.time``."""
        with _EngineCall(self, inputs, in_place=True) as call:
            return self.device.time(call.enqueue)


class _EngineCall:
    """Buffers of one call."""

    def __init__(
        self, session: EngineSession, inputs: Mapping[str, np.ndarray], in_place: bool
    ) -> None:
        self.session, self.device = session, session.device
        sizes = sizes_of(session.shapes, inputs)
        self.context = session.contexts[profile_for(session.profiles, sizes)]
        self.inputs = {n: self._typed(n, inputs[n]) for n in session.inputs}
        self.pairs = session.pairs if in_place else {}
        self.owned: list[int] = []

    def __enter__(self) -> _EngineCall:
        places: dict[str, int] = {}
        for name, array in self.inputs.items():
            self.context.set_input_shape(name, tuple(array.shape))
            places[name] = self._allocate(array.nbytes)
            self.device.write(places[name], array)
        self.arrays = {n: self._empty(n) for n in self.session.outputs}
        for name, array in self.arrays.items():
            past = self.pairs.get(name, "")
            same = past in places and self.inputs[past].nbytes == array.nbytes
            places[name] = places[past] if same else self._allocate(array.nbytes)
        for name, address in places.items():
            self.context.set_tensor_address(name, address)
        self.places = places
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for address in self.owned:
            self.device.free(address)

    def enqueue(self) -> None:
        """Put the call on the stream."""
        if not self.context.execute_async_v3(int(self.device.stream)):
            raise EnvironmentProblemError(
                f"The engine does not run: {'; '.join(self.session.log.errors()[-2:])}"
            )

    def results(self) -> dict[str, np.ndarray]:
        """Outputs, copied from the GPU."""
        for name, array in self.arrays.items():
            self.device.read(self.places[name], array)
        return self.arrays

    def _allocate(self, size: int) -> int:
        self.owned.append(self.device.allocate(size))
        return self.owned[-1]

    def _typed(self, name: str, array: np.ndarray) -> np.ndarray:
        wanted = np.dtype(ARRAYS[self.session.engine.get_tensor_dtype(name).name])
        if array.dtype != wanted:
            raise UsageError(f"{name} has dtype {array.dtype}; the engine takes {wanted}.")
        return array

    def _empty(self, name: str) -> np.ndarray:
        dtype = ARRAYS[self.session.engine.get_tensor_dtype(name).name]
        return np.empty(tuple(self.context.get_tensor_shape(name)), dtype)
