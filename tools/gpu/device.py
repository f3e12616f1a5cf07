"""A GPU through the CUDA driver: memory, graphs and times; cuda-bindings is all that it needs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from linexport.plugins.tensorrt.flavour import driver
from linexport.plugins.tensorrt.launcher import capability
from linexport.plugins.tensorrt.modules import checked

REPLAYS, WARM = 20, 2
POISON = 0xFF
"""Bytes that memory is filled with before anything is written: NaN in every float type."""


class Memory:
    """Device memory of one array."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(checked(driver().cuMemAlloc(max(size, 1))))
        self.poison()

    def poison(self) -> None:
        """Fill with NaN."""
        checked(driver().cuMemsetD8(self.address, POISON, max(self.size, 1)))

    def put(self, x: np.ndarray) -> None:
        """Copy an array there, as often as it fits, the last time in part."""
        data = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
        if not data.size:
            return
        checked(driver().cuMemcpyHtoD(self.address, data.ctypes.data, min(data.size, self.size)))
        done = data.size
        while done < self.size:
            more = min(done, self.size - done)
            checked(driver().cuMemcpyDtoD(self.address + done, self.address, more))
            done += more

    def get(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return what is there."""
        found = np.empty(shape, dtype)
        if found.nbytes:
            checked(driver().cuMemcpyDtoH(found.ctypes.data, self.address, found.nbytes))
        return found

    def free(self) -> None:
        """Give it back."""
        checked(driver().cuMemFree(self.address))


class Device:
    """The first GPU, with a context and a stream.

    Raises:
        EnvironmentProblemError: no driver or GPU.
    """

    def __init__(self) -> None:
        cuda = driver()
        checked(cuda.cuInit(0))
        self.device = checked(cuda.cuDeviceGet(0))
        checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(self.device))))
        self.stream = checked(cuda.cuStreamCreate(0))
        self.sm = capability()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cuda = driver()
        checked(cuda.cuStreamDestroy(self.stream))
        checked(cuda.cuDevicePrimaryCtxRelease(self.device))

    def describe(self) -> dict[str, Any]:
        """Return the GPU's name, multiprocessors, capability and the driver's CUDA version."""
        cuda = driver()
        name = checked(cuda.cuDeviceGetName(64, self.device)).split(b"\0")[0].decode()
        kind = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return {
            "gpu": name,
            "multiprocessors": int(checked(cuda.cuDeviceGetAttribute(kind, self.device))),
            "capability": self.sm / 10,
            "driver_cuda": int(checked(cuda.cuDriverGetVersion())),
        }

    def wait(self) -> None:
        """Until the stream has ended."""
        checked(driver().cuStreamSynchronize(self.stream))

    def captured(self, call: Callable[[], object]) -> Graph:
        """Return what a call launches, as a graph; it does not run meanwhile."""
        cuda = driver()
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        checked(cuda.cuStreamBeginCapture(self.stream, mode))
        try:
            call()
        finally:
            graph = checked(cuda.cuStreamEndCapture(self.stream))
        return Graph(graph, self.stream)

    def milliseconds(self, graph: Graph) -> float:
        """Median time of a graph's replays, by events."""
        cuda, times = driver(), []
        first, last = (checked(cuda.cuEventCreate(0)) for _ in range(2))
        for _ in range(REPLAYS + WARM):
            checked(cuda.cuEventRecord(first, self.stream))
            graph.replay()
            checked(cuda.cuEventRecord(last, self.stream))
            checked(cuda.cuEventSynchronize(last))
            times.append(float(checked(cuda.cuEventElapsedTime(first, last))))
        for event in (first, last):
            checked(cuda.cuEventDestroy(event))
        return statistics.median(times[WARM:])

    def bandwidth(self, size: int = 2**31) -> float:
        """Bytes read and written a second by a copy within the device."""
        source, target = Memory(size), Memory(size)
        source.put(np.random.default_rng(0).integers(0, 255, 2**22, np.uint8))

        def copy() -> None:
            checked(driver().cuMemcpyDtoDAsync(target.address, source.address, size, self.stream))

        graph = self.captured(copy)
        seconds = self.milliseconds(graph) / 1000
        for held in (graph, source, target):
            held.free()
        return 2 * size / seconds


class Graph:
    """Launches captured from a stream."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self.stream, self.graph = stream, graph
        self.executable = checked(driver().cuGraphInstantiate(graph, 0))

    def replay(self) -> None:
        """Launch them again."""
        checked(driver().cuGraphLaunch(self.executable, self.stream))

    def free(self) -> None:
        """Give it back."""
        checked(driver().cuGraphExecDestroy(self.executable))
        checked(driver().cuGraphDestroy(self.graph))
