"""The GPU, through the CUDA driver: memory, copies, a stream, timing by events and graph replay."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.flavour import driver
from linexport.plugins.tensorrt.launcher import capability, checked

WARMUP, REPEATS = 3, 20


class Device:
    """The first GPU of this machine, its primary context current, and one stream on it.

    Raises:
        EnvironmentProblemError: there is no driver, or no GPU.
    """

    def __init__(self) -> None:
        self.cuda = driver()
        checked(self.cuda.cuInit(0))
        if checked(self.cuda.cuDeviceGetCount()) == 0:
            raise EnvironmentProblemError("The NVIDIA driver finds no GPU on this machine.")
        checked(self.cuda.cuCtxSetCurrent(checked(self.cuda.cuDevicePrimaryCtxRetain(0))))
        self.sm = capability()
        self.stream = checked(self.cuda.cuStreamCreate(0))

    def allocate(self, size: int) -> int:
        """Address of ``size`` bytes; at least one, since an empty tensor needs an address too."""
        return int(checked(self.cuda.cuMemAlloc(max(size, 1))))

    def free(self, address: int) -> None:
        """Give memory back."""
        checked(self.cuda.cuMemFree(address))

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device."""
        array = np.ascontiguousarray(array)
        if array.nbytes:
            checked(self.cuda.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))

    def read(self, address: int, array: np.ndarray) -> None:
        """Copy from the device into a contiguous array."""
        if array.nbytes:
            checked(self.cuda.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))

    def wait(self) -> None:
        """Until everything on the stream is done."""
        checked(self.cuda.cuStreamSynchronize(self.stream))

    def time(self, enqueue: Callable[[], None]) -> dict[str, Any]:
        """Milliseconds of what ``enqueue`` puts on the stream: launched each time, and replayed.

        A graph that cannot be captured leaves ``graph_ms`` None.
        """
        launched = self._timed(enqueue)
        cuda = self.cuda
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        replayed, problem = None, None
        try:
            checked(cuda.cuStreamBeginCapture(self.stream, mode))
            try:
                enqueue()
            finally:
                graph = checked(cuda.cuStreamEndCapture(self.stream))
            ready = checked(cuda.cuGraphInstantiate(graph, 0))
            replayed = self._timed(lambda: checked(cuda.cuGraphLaunch(ready, self.stream)))
        except EnvironmentProblemError as error:
            problem = str(error)
        return {"launched_ms": launched, "graph_ms": replayed, "graph_problem": problem}

    def _timed(self, enqueue: Callable[[], None]) -> float:
        cuda, times = self.cuda, []
        start, end = (checked(cuda.cuEventCreate(0)) for _ in range(2))
        for repeat in range(WARMUP + REPEATS):
            checked(cuda.cuEventRecord(start, self.stream))
            enqueue()
            checked(cuda.cuEventRecord(end, self.stream))
            checked(cuda.cuEventSynchronize(end))
            if repeat >= WARMUP:
                times.append(float(checked(cuda.cuEventElapsedTime(start, end))))
        return round(statistics.median(times), 4)
