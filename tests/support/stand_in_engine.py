"""An engine that is none: TensorRT's interface, computed by ONNX Runtime in the driver's memory.

The memory is that of the stand-in for the driver, which is the host's. A call is put on the stream
as a host function, so that a graph captures it with the addresses it had. TensorRT's demands of its
callers are made: memory for activations, addresses of device memory, and no new shapes in a
capture. Names are those of TensorRT-RTX's classes, as ``test_runtime`` checks.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from linexport.manifest import Manifest
from linexport.manifest.records import InputRecord
from linexport.targets.lowering.kept_logits import with_logits_at
from linexport.targets.runtime.options import LOGITS_AT, LOGITS_TO_KEEP
from linexport.targets.trt.precision import open_here

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

TYPES = {"float32": "FLOAT", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}

ACTIVATIONS = 10**6
"""Bytes that the first profile needs; the second needs twice as many."""

TensorIOMode = Enum("TensorIOMode", ("INPUT", "OUTPUT"))
TensorLocation = Enum("TensorLocation", ("DEVICE", "HOST"))
Allocation = Enum("ExecutionContextAllocationStrategy", ("STATIC", "USER_MANAGED"))
Strategy = Enum("CudaGraphStrategy", ("DISABLED", "WHOLE_GRAPH_CAPTURE"))


@cache
def driver() -> ctypes.CDLL:
    """Return the stand-in for the driver."""
    found = ctypes.CDLL("libcuda.so.1")
    found.fakeDriverHolds.argtypes = (ctypes.c_uint64, ctypes.c_size_t)
    found.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p)
    return found


wrong: list[str] = []
"""What was refused inside of a host function, from which no exception comes."""


class RefusalError(Exception):
    """What TensorRT would not do, or would do wrong without a word."""


class IRuntimeCache:
    """Kernels that were compiled: one for each context that ran."""

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, content: bytes) -> bool:
        self.kernels = content
        return content.startswith(b"kernels")

    def serialize(self) -> bytes:
        return b"kernels" + self.kernels


class IRuntimeConfig:
    def __init__(self) -> None:
        self.strategy, self.cache = Allocation.STATIC, None
        self.cuda_graph_strategy = Strategy.DISABLED

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True

    def get_runtime_cache(self) -> Any:
        return self.cache


class ICudaEngine:
    """The model of an artifact."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self.logits = manifest, manifest.engines[0].logits
        model: Path | bytes = folder / "model.onnx"
        kept = list[InputRecord]()
        if self.logits is not None:
            graph = with_logits_at(onnx.load_model(str(model)), self.logits)
            model = graph.SerializeToString()
            kept = [InputRecord(LOGITS_AT, "int64", ("rows of logits", LOGITS_TO_KEEP))]
        self.session, self.inputs = open_here(model, threads=1), [*manifest.inputs, *kept]
        self.records = [*self.inputs, *manifest.outputs]
        self.given = {r.name for r in self.inputs}
        self.num_io_tensors = len(self.records)
        self.num_optimization_profiles = len(manifest.engines[0].profiles)

    def get_tensor_name(self, index: int) -> str:
        return self.records[index].name

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self.given else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        found = next(r.dtype for r in self.records if r.name == name)
        return SimpleNamespace(name=TYPES[found])

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.HOST if name == "past_length" else TensorLocation.DEVICE

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return ACTIVATIONS * (profile + 1)

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, config: Any) -> IExecutionContext:
        """Take a configuration, or a strategy alone."""
        strategy = config.strategy if isinstance(config, IRuntimeConfig) else config
        return IExecutionContext(self, config, strategy)


class IExecutionContext:
    """A context; ``replays`` of its calls are not its own calls."""

    def __init__(self, engine: ICudaEngine, config: Any, strategy: Any) -> None:
        self.engine, self.config, self.strategy = engine, config, strategy
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.places: dict[str, int] = {}
        self.memory = (0, 0)
        self.profile: int | None = None
        self.prepared: dict[str, tuple[int, ...]] | None = None
        self.kept: list[Any] = []

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = memory, size

    def set_optimization_profile_async(self, profile: int, stream: int) -> None:
        self.profile = profile

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = tuple(shape)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sizes: dict[str, int] = {}
        for record in self.engine.inputs:
            for dim, size in zip(record.shape, self.shapes[record.name], strict=True):
                if isinstance(dim, str):
                    sizes[dim] = size
        shape = next(r.shape for r in self.engine.manifest.outputs if r.name == name)
        grown = {s.present: s for s in self.engine.manifest.states}.get(name)
        found = [d if isinstance(d, int) else sizes.get(str(d), -1) for d in shape]
        if name == self.engine.logits:
            found[1] = sizes[LOGITS_TO_KEEP]
        if grown is not None and grown.grows is not None:
            tokens = next(x for n, x in self.shapes.items() if n in ("input_ids", "x", "tokens"))
            past = self.shapes[grown.past]
            found = list(past)
            found[grown.grows] = past[grown.grows] + tokens[1]
        return tuple(found)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.places[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self._check(stream)
        shapes, places = dict(self.shapes), dict(self.places)

        def compute(_: None) -> None:
            engine = self.engine
            inputs = {n: self._values(n, shapes[n], places[n]).copy() for n in sorted(engine.given)}
            for name, values in engine.session.run(inputs).items():
                self._values(name, values.shape, places[name])[...] = values

        def guarded(_: int | None) -> None:
            try:
                compute(None)
            except Exception as error:
                wrong.append(repr(error))

        function = HOST_FUNCTION(guarded)
        self.kept.append(function)
        return driver().cuLaunchHostFunc(stream, function, None) == 0

    def _check(self, stream: int) -> None:
        address, size = self.memory
        needed = self.engine.get_device_memory_size_for_profile_v2(self.profile or 0)
        if self.strategy != Allocation.USER_MANAGED or size < needed:
            raise RefusalError("no memory for activations")
        if not driver().fakeDriverHolds(address, size):
            raise RefusalError("activations are not in device memory")
        from cuda.bindings import driver as cuda

        error, status, *_ = cuda.cuStreamIsCapturing(cuda.CUstream(stream))
        assert not int(error)
        if int(status) and self.prepared != self.shapes:
            raise RefusalError("new shapes in a capture")
        self.prepared = dict(self.shapes)
        inputs = {self.places[n]: n for n in self.engine.given}
        pairs = {(s.present, s.past) for s in self.engine.manifest.states}
        for name in (r.name for r in self.engine.manifest.outputs):
            past = inputs.get(self.places[name])
            if past is not None and (name, past) not in pairs:
                raise RefusalError(f"{name} is where {past} is")

    def _values(self, name: str, shape: tuple[int, ...], address: int) -> np.ndarray:
        record = next(r for r in self.engine.records if r.name == name)
        dtype = np.dtype(record.dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        on_host = self.engine.get_tensor_location(name) == TensorLocation.HOST
        if size and not on_host and not driver().fakeDriverHolds(address, size):
            raise RefusalError(f"{name} is not in device memory")
        raw = (ctypes.c_char * size).from_address(address) if size else b""
        return np.frombuffer(raw, dtype).reshape(shape)


class ILogger:
    """Nothing is logged."""


class Runtime:
    """Opens the engine of ``folder``, whatever the file has."""

    folder: Path
    manifest: Manifest
    opened: list[ICudaEngine] = []  # noqa: RUF012

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, content: bytes) -> ICudaEngine:
        self.opened.append(ICudaEngine(self.folder, self.manifest))
        return self.opened[-1]


def library(folder: Path, manifest: Manifest, name: str) -> Any:
    """Return a stand-in for the Python module of a library, tensorrt-10, tensorrt or -rtx."""
    Runtime.folder, Runtime.manifest = folder, manifest
    found = SimpleNamespace(
        __version__=manifest.engines[0].version,
        Runtime=Runtime,
        ILogger=ILogger,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        ExecutionContextAllocationStrategy=Allocation,
    )
    if name != "tensorrt-10":
        found.IRuntimeConfig = IRuntimeConfig
    if name == "tensorrt-rtx":
        found.CudaGraphStrategy = Strategy
    return found
