"""Memory that nobody needs now, given back to the system.

The C library keeps what was freed: weights are many, and leave it in holes. And values that are
read once in a while need not be in memory in between. Those that are *paged* are in a file without
a name, mapped to memory: the system reads a page when it is touched, and lets go of it when it is
told to, without losing what was written there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # the command's help comes without it
    import numpy as np

WORTH = 2**20
"""Bytes from which values are worth a file."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GLIBC_MOST = 2**25
"""Bytes that glibc raises the second of these to by itself, and twice that for the first."""

_MAPS: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()
"""Files that are mapped, with their addresses."""


_OWN: list[bool] = []
"""Not empty where linexport may set options of this process's allocator."""


def own_process() -> None:
    """Say that this process is linexport's own: the program, or the child of a conversion.

    A host that uses the library keeps its allocator's options, which cannot be read nor restored.
    """
    _OWN.append(True)


def give_back() -> None:
    """What was freed, where the C library is glibc, and the pages of all that is paged."""
    for file in list(_MAPS):
        file.madvise(mmap.MADV_DONTNEED)
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return
    trim(0)


@contextmanager
def frugal() -> Iterator[None]:
    """Every large block is memory of its own, which goes back to the system when it is freed.

    The C library, glibc that is, does so with the first ones only, and then keeps blocks of up to
    32 MB for others to come, in between which holes are left. Afterwards it does that again.
    Nothing happens in a process that is not linexport's own.
    """
    if not _OWN:
        yield
        return
    _own_from(WORTH)
    try:
        yield
    finally:
        _own_from(_GLIBC_MOST)


def _own_from(size: int) -> None:
    """Blocks of so many bytes are memory of their own."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    set_option(_M_MMAP_THRESHOLD, size)
    set_option(_M_TRIM_THRESHOLD, 2 * size)


def release(address: int, size: int) -> None:
    """Let go of the pages of these bytes, if they are paged."""
    for file, begin in list(_MAPS.items()):
        start, stop = max(address - begin, 0), min(address - begin + size, len(file))
        if start < stop:
            start -= start % mmap.PAGESIZE
            file.madvise(mmap.MADV_DONTNEED, start, stop - start)


def is_paged(address: int) -> bool:
    """What is there is paged."""
    return any(0 <= address - begin < len(file) for file, begin in list(_MAPS.items()))


def blocks(sizes: Sequence[int]) -> list[np.ndarray]:
    """Paged arrays of so many bytes (at least 1), uint8, each at the start of a page.

    They are in memory where there is no room for the file (in TMPDIR), or no such system call.
    """
    import numpy as np

    if not sizes:
        return []
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    file = _mapped(starts[-1])
    whole = np.frombuffer(file or mmap.mmap(-1, starts[-1]), np.uint8)
    if file:
        _MAPS[file] = whole.ctypes.data
    return [whole[a : a + n] for a, n in zip(starts, sizes, strict=False)]


def paged(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copies of the arrays; those that are worth it are paged."""
    import numpy as np

    places = iter(blocks([x.nbytes for x in arrays if x.nbytes >= WORTH]))
    copies = []
    for values in arrays:
        if values.nbytes < WORTH:
            copies.append(values.copy())
            continue
        block = next(places)
        copies.append(block.view(values.dtype).reshape(values.shape))
        np.copyto(copies[-1], values)
        release(block.ctypes.data, block.nbytes)
    return copies


def _mapped(size: int) -> mmap.mmap | None:
    """A file of that size."""
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is None or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        with tempfile.TemporaryFile() as file:
            # Without its room on the disk, a page that finds none later would end the process.
            allocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None
