"""DLPack capsules of memory on a device: https://dmlc.github.io/dlpack, version 0 of the structure.

    capsule "dltensor" -> DLManagedTensor -> address, shape; deleter

The consumer calls the deleter, or where there was none, the capsule's destructor does: who only
reads a capsule keeps it for as long as it uses the memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from linexport.errors import UsageError
from linexport.system.untyped import ArrayLike

CPU, CUDA = 1, 2
"""Kinds of devices."""

KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
"""Codes of element types by NumPy's kind."""

NAME = b"dltensor"

LEGACY_STREAM = 1
"""CUDA's default stream, by the number that the interface gives it."""


class DLTensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_held: dict[int, tuple[object, ...]] = {}
"""Structures that were given out, by address, with what they point to."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _held.pop(address, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """Delete what no consumer took: one that did has renamed the capsule."""
    if _is_valid(capsule, NAME):
        _held.pop(_pointer(capsule, NAME), None)


_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)


def capsule(
    owner: object,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    index: int,
    kind: int,
) -> object:
    """Return a capsule of contiguous memory, which holds ``owner`` until it is deleted.

    Raises:
        BufferError: DLPack has no such element type.
    """
    if dtype.kind not in KINDS:
        raise BufferError(f"DLPack has no element type {dtype}")
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    made = DLManagedTensor()
    made.tensor = DLTensor(
        *(address, kind, index, len(shape), KINDS[dtype.kind], 8 * dtype.itemsize, 1),
        *(ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)), None, 0),
    )
    made.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    place = ctypes.addressof(made)
    _held[place] = made, sizes, owner
    found: object = _new(place, NAME, ctypes.cast(_destroy, ctypes.c_void_p))
    return found


@dataclass(frozen=True)
class Described:
    """Memory that a capsule is of.

    Attributes:
        capsule: which keeps it.
        address: of its first element.
        shape: its sizes.
        dtype: of its elements.
        strides: in bytes; None where it is contiguous.
        index: of its device.
    """

    capsule: object
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    strides: tuple[int, ...] | None
    index: int


def kind_of(values: object) -> int | None:
    """Return the kind of device that an array is on; None where it does not have DLPack."""
    found = getattr(values, "__dlpack_device__", None)
    return None if found is None else int(found()[0])


def described(values: ArrayLike) -> Described:
    """Describe the memory of an array that another library keeps on a GPU.

    What the library still writes to it is done once ``LEGACY_STREAM`` is.

    Raises:
        UsageError: NumPy has no such element type.
    """
    given = values.__dlpack__(stream=LEGACY_STREAM)
    tensor = DLManagedTensor.from_address(_pointer(id(given), NAME)).tensor
    kinds = {code: kind for kind, code in KINDS.items()}
    if tensor.code not in kinds or tensor.lanes != 1 or tensor.bits % 8:
        raise UsageError(
            f"Found an array of DLPack's element type {tensor.code} with {tensor.bits} bits; "
            "expected integers, floating-point numbers or booleans that NumPy has."
        )
    dtype = np.dtype(f"{kinds[tensor.code]}{tensor.bits // 8}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tensor.strides[: tensor.ndim] if tensor.strides else None
    return Described(
        given,
        int(tensor.data or 0) + int(tensor.byte_offset),
        shape,
        dtype,
        None if strides is None else tuple(dtype.itemsize * n for n in strides),
        tensor.device_id,
    )
