"""An array in the memory of a GPU, which other libraries take as it is.

    np.asarray(array)                    a copy in the host's memory
    torch.as_tensor(array), cupy, ...    the same memory, by ``__cuda_array_interface__``
    torch.from_dlpack(array), jax, ...   the same memory, by DLPack

An array is a value: no call of a model writes to one that was returned. Its memory is used again
once nobody holds the array, nor a view of it. It is contiguous; views are ranges of its first axis.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from linexport.errors import UsageError
from linexport.targets.trt import dlpack
from linexport.targets.trt.device import Device

INTERFACE = "__cuda_array_interface__"


class DeviceBlock:
    """Memory of a device, given back when nobody holds it."""

    def __init__(self, device: Device, size: int) -> None:
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
        device: Device,
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
    def of(cls, device: Device, values: Any) -> DeviceArray:
        """Return an array of the host on the device; ``values`` may change afterwards."""
        made = cls(device, values.shape, values.dtype)
        made._put(values)
        return made

    @classmethod
    def wrap(cls, device: Device, values: Any) -> DeviceArray:
        """Return an array of another library, in its memory.

        Raises:
            UsageError: it is not contiguous.
        """
        if isinstance(values, cls):
            return values
        found = getattr(values, INTERFACE)
        dtype, shape = np.dtype(found["typestr"]), tuple(found["shape"])
        strides = found.get("strides")
        if strides is not None and tuple(strides) != _strides(shape, dtype.itemsize):
            raise UsageError(
                f"Found an array on the GPU of shape {shape} with strides {strides}; expected a "
                "contiguous one."
            )
        stream = found.get("stream")
        if stream is not None:
            device.wait_for(int(stream))
        return cls(device, shape, dtype, values, int(found["data"][0]))

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
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the memory; there is nothing to wait for."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of device, CUDA, and its index."""
        return dlpack.CUDA, self.device.index

    def __dlpack__(self, **options: Any) -> object:
        """Return the memory as a DLPack capsule; there is nothing to wait for."""
        return dlpack.capsule(self, self.address, self.shape, self.dtype, self.device.index)

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

    def __setitem__(self, index: int | slice, values: Any) -> None:
        """Copy an array of the host or of this device over a row, or a range of rows."""
        self[index]._put(values)

    def copy(self) -> DeviceArray:
        """Return a copy on the device."""
        made = DeviceArray(self.device, self.shape, self.dtype)
        made._put(self)
        return made

    def _rows(self, index: slice) -> DeviceArray:
        start, end, _ = index.indices(self.shape[0])
        shape = (max(end - start, 0), *self.shape[1:])
        offset = start * prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceArray(self.device, shape, self.dtype, self._owner, self.address + offset)

    def _put(self, values: Any) -> None:
        if (tuple(values.shape), values.dtype) != (self.shape, self.dtype):
            raise ValueError(f"found {values.shape} {values.dtype}; expected {self.shape}")
        with self.device.current():
            if isinstance(values, DeviceArray):
                self.device.copy(self.address, values.address, self.nbytes)
            elif values.any():
                self.device.write(self.address, values)
            else:  # what sequences begin with
                self.device.clear(self.address, self.nbytes)


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
