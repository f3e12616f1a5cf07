"""An array in the memory of a device, which other libraries take as it is.

    np.asarray(array)                    a copy in the host's memory
    torch.as_tensor(array), cupy, ...    the same memory, by ``__cuda_array_interface__`` (CUDA)
    torch.from_dlpack(array), jax, ...   the same memory, by DLPack

An array is a value: no call of a model writes to one that was returned. Its memory is used again
once nobody holds the array, nor a view of it. It is contiguous; views are ranges of its first axis.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol

import numpy as np

from linexport.errors import UsageError
from linexport.system.untyped import ArrayLike
from linexport.targets.runtime import dlpack

INTERFACE = "__cuda_array_interface__"


class Memory(Protocol):
    """A device's memory, and copies from and to it in the order of the calls.

    Attributes:
        index: of the device.
        kind: DLPack's number of such devices.
    """

    index: int
    kind: int

    def current(self) -> AbstractContextManager[None]:
        """Make the device that of this thread."""
        ...

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes."""
        ...

    def release(self, address: int) -> None:
        """Take memory back."""
        ...

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device."""
        ...

    def read(self, address: int, array: np.ndarray) -> None:
        """Copy from the device into a contiguous array; ``wait`` before it is used."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device."""
        ...

    def clear(self, address: int, size: int) -> None:
        """Fill with zeros."""
        ...

    def wait(self) -> None:
        """Wait until all of it is done."""
        ...


class StreamedMemory(Memory, Protocol):
    """Memory of a device whose streams are known."""

    def wait_for(self, stream: int) -> None:
        """Wait until everything on another library's stream is done."""
        ...


class DeviceBlock:
    """Memory of a device, given back when nobody holds it."""

    def __init__(self, device: Memory, size: int) -> None:
        self.device, self.address = device, device.allocate(size)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.device.release(self.address)


class DeviceArray:
    """A contiguous array on a device.

    Attributes:
        device: it is on.
        address: of its first element.
        shape: its sizes.
        dtype: of its elements.
    """

    def __init__(
        self,
        device: Memory,
        shape: tuple[int, ...],
        dtype: Any,
        owner: object = None,
        address: int | None = None,
    ) -> None:
        self.device, self.shape, self.dtype = device, tuple(shape), np.dtype(dtype)
        if owner is None or address is None:
            block = DeviceBlock(device, self.nbytes)
            owner, address = block, block.address
        self._owner, self.address = owner, address

    @classmethod
    def of(cls, device: Memory, values: ArrayLike) -> DeviceArray:
        """Return an array of the host on the device; ``values`` may change afterwards."""
        made = cls(device, values.shape, values.dtype)
        made._put(values)
        return made

    @classmethod
    def wrap(cls, device: StreamedMemory, values: object) -> DeviceArray:
        """Return an array of another library, in its memory.

        Raises:
            UsageError: it is not contiguous, or on another GPU, or see ``dlpack.described``.
        """
        if isinstance(values, cls):
            return values
        if not hasattr(values, INTERFACE):
            return cls._by_dlpack(device, values)
        found = getattr(values, INTERFACE)
        dtype, shape = np.dtype(found["typestr"]), tuple(found["shape"])
        _check_contiguous(shape, found.get("strides"), dtype)
        stream = found.get("stream")
        if stream is not None:
            device.wait_for(int(stream))
        return cls(device, shape, dtype, values, int(found["data"][0]))

    @classmethod
    def _by_dlpack(cls, device: StreamedMemory, values: object) -> DeviceArray:
        found = dlpack.described(values)
        _check_contiguous(found.shape, found.strides, found.dtype)
        if found.index != device.index:
            raise UsageError(f"Found an array on GPU {found.index}; expected GPU {device.index}.")
        device.wait_for(dlpack.LEGACY_STREAM)
        return cls(device, found.shape, found.dtype, found.capsule, found.address)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, ArrayLike]:
        """Describe the memory; there is nothing to wait for.

        Raises:
            AttributeError: it is not CUDA's.
        """
        if self.device.kind != dlpack.CUDA:
            raise AttributeError(INTERFACE)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of device and its index."""
        return self.device.kind, self.device.index

    def __dlpack__(self, **options: object) -> object:
        """Return the memory as a DLPack capsule; there is nothing to wait for."""
        device = self.device
        return dlpack.capsule(self, self.address, self.shape, self.dtype, device.index, device.kind)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a copy in the host's memory.

        Raises:
            ValueError: without a copy, which cannot be.
        """
        if copy is False:
            raise ValueError("an array on a GPU is copied to the host")
        found = np.empty(self.shape, self.dtype)
        with self.device.current():
            self.device.read(self.address, found)
            self.device.wait()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __len__(self) -> int:
        """Return the size of the first axis."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return a view of a row or a range of rows; for other indices, a copy on the host."""
        if isinstance(index, int):
            rows = self._rows(slice(index, index + 1 or None))
            return DeviceArray(self.device, self.shape[1:], self.dtype, rows._owner, rows.address)
        if isinstance(index, slice) and index.step in (None, 1):
            return self._rows(index)
        return np.asarray(self)[index]

    def __setitem__(self, index: int | slice, values: object) -> None:
        """Copy an array of the host or of this device over a row, or a range of rows."""
        self[index]._put(values)

    def copy(self) -> DeviceArray:
        """Return a copy on the device."""
        made = DeviceArray(self.device, self.shape, self.dtype)
        made._put(self)
        return made

    def narrowed(self, axis: int, start: int) -> DeviceArray:
        """Return what is from ``start`` on along an axis, on the device."""
        if start == 0:
            return self
        sizes = list(self.shape)
        sizes[axis] -= start
        made = DeviceArray(self.device, tuple(sizes), self.dtype)
        made._copy_along(axis, 0, self, start, sizes[axis])
        return made

    def write_end(self, axis: int, values: DeviceArray) -> None:
        """Copy an array of the same sizes over the end along an axis, where it is shorter."""
        length = values.shape[axis]
        self._copy_along(axis, self.shape[axis] - length, values, 0, length)

    def clear(self) -> None:
        """Fill with zeros."""
        with self.device.current():
            self.device.clear(self.address, self.nbytes)

    def _copy_along(
        self, axis: int, start: int, values: DeviceArray, first: int, length: int
    ) -> None:
        """Copy ``length`` places of ``values`` along an axis, one stretch of memory at a time."""
        step = prod(self.shape[axis + 1 :]) * self.dtype.itemsize
        with self.device.current():
            for i in range(prod(self.shape[:axis])):
                target = self.address + (i * self.shape[axis] + start) * step
                source = values.address + (i * values.shape[axis] + first) * step
                self.device.copy(target, source, length * step)

    def _rows(self, index: slice) -> DeviceArray:
        start, end, _ = index.indices(self.shape[0])
        shape = (max(end - start, 0), *self.shape[1:])
        offset = start * prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceArray(self.device, shape, self.dtype, self._owner, self.address + offset)

    def _put(self, values: ArrayLike) -> None:
        if (tuple(values.shape), values.dtype) != (self.shape, self.dtype):
            raise ValueError(f"found {values.shape} {values.dtype}; expected {self.shape}")
        with self.device.current():
            if isinstance(values, DeviceArray):
                self.device.copy(self.address, values.address, self.nbytes)
            elif values.any():
                self.device.write(self.address, values)
            else:  # what sequences begin with
                self.device.clear(self.address, self.nbytes)


def is_on_device(values: object, kind: int) -> bool:
    """Return whether an array is in the memory of a kind of device, by either interface."""
    return hasattr(values, INTERFACE) or dlpack.kind_of(values) == kind


def _check_contiguous(shape: tuple[int, ...], strides: Any, dtype: np.dtype[np.generic]) -> None:
    if strides is not None and tuple(strides) != _strides(shape, dtype.itemsize):
        raise UsageError(
            f"Found an array on the GPU of shape {shape} with strides {tuple(strides)}; expected "
            "a contiguous one."
        )


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
