"""A GPU through the CUDA driver: its context, one stream, memory and copies on it.

Everything is put on the stream in order, so that memory given back is used again for what comes
later there; ``wait`` is the only call that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.flavour import driver
from linexport.plugins.tensorrt.launcher import capability
from linexport.plugins.tensorrt.modules import checked
from linexport.targets.runtime import dlpack
from linexport.targets.runtime.memory_pool import Blocks


class Device:
    """One GPU of this machine, with its primary context and a stream.

    Args:
        index: of the GPU.

    Attributes:
        index: of the GPU.
        kind: DLPack's number of such devices.
        sm: its compute capability, ten times its number.
        stream: address of the stream, for TensorRT.
        stream_handle: the same, for the driver.

    Raises:
        EnvironmentProblemError: the driver or the GPU is missing.
    """

    kind = dlpack.CUDA

    def __init__(self, index: int = 0) -> None:
        self.cuda = driver()
        checked(self.cuda.cuInit(0))
        count = checked(self.cuda.cuDeviceGetCount())
        if count == 0:
            raise EnvironmentProblemError("The NVIDIA driver finds no GPU on this machine.")
        if not 0 <= index < count:
            raise EnvironmentProblemError(
                f"This machine has {count} GPUs, 0 to {count - 1}; found device {index}."
            )
        self.index = index
        self._device = checked(self.cuda.cuDeviceGet(index))
        self._context = checked(self.cuda.cuDevicePrimaryCtxRetain(self._device))
        self._lock = threading.RLock()
        self._blocks = Blocks(self._take, self._give, self.wait)
        with self.current():
            self.sm = capability()
            self.stream_handle = checked(self.cuda.cuStreamCreate(0))
        self.stream = int(self.stream_handle)
        self.closed = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have the device for this thread alone, its context current.

        A capture would take what other threads put on the stream meanwhile.
        """
        with self._lock:
            yield from self._switched()

    def _switched(self) -> Iterator[None]:
        before = checked(self.cuda.cuCtxGetCurrent())
        checked(self.cuda.cuCtxSetCurrent(self._context))
        try:
            yield
        finally:
            checked(self.cuda.cuCtxSetCurrent(before))

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes: of memory given back earlier, where that fits.

        Raises:
            EnvironmentProblemError: the GPU has no memory left.
        """
        found = self._blocks.reuse(size)
        if found is None:
            with self.current():
                found = self._blocks.take(size)
        return found

    def release(self, address: int) -> None:
        """Take memory back for later use; any thread may do so, also in a garbage collection."""
        if not self.closed:
            self._blocks.release(address)

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device; it is free to change afterwards."""
        array = np.ascontiguousarray(array)
        if array.nbytes:
            checked(
                self.cuda.cuMemcpyHtoDAsync(
                    address, array.ctypes.data, array.nbytes, self.stream_handle
                )
            )

    def read(self, address: int, array: np.ndarray) -> None:
        """Copy from the device into a contiguous array; ``wait`` before it is used."""
        if array.nbytes:
            checked(
                self.cuda.cuMemcpyDtoHAsync(
                    array.ctypes.data, address, array.nbytes, self.stream_handle
                )
            )

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device."""
        if size:
            checked(self.cuda.cuMemcpyDtoDAsync(target, source, size, self.stream_handle))

    def clear(self, address: int, size: int) -> None:
        """Fill with zeros."""
        if size:
            checked(self.cuda.cuMemsetD8Async(address, 0, size, self.stream_handle))

    def wait(self) -> None:
        """Until everything on the stream is done."""
        checked(self.cuda.cuStreamSynchronize(self.stream_handle))

    def wait_for(self, stream: int) -> None:
        """Until everything on another library's stream is done."""
        with self.current():
            checked(self.cuda.cuStreamSynchronize(self.cuda.CUstream(stream)))

    def close(self) -> None:
        """Free all memory, that of arrays still held too, the stream and the context."""
        if self.closed:
            return
        self.closed = True
        with self.current():
            self.wait()
            self._blocks.close()
            checked(self.cuda.cuStreamDestroy(self.stream_handle))
        checked(self.cuda.cuDevicePrimaryCtxRelease(self._device))

    def _take(self, size: int) -> int:
        return int(checked(self.cuda.cuMemAlloc(size)))

    def _give(self, address: int) -> None:
        checked(self.cuda.cuMemFree(address))
