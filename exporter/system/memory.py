"""Unused memory returned to the system, and arrays in memory-mapped files.

The C library keeps freed blocks, and the many weights of a model leave them scattered. Values that
are read once in a while need not be resident in between: *memory-mapped* ones are in an unnamed
file, whose pages the system reads when they are touched and drops on request, without
losing what was written there.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # the command's help comes without it
    from pathlib import Path

    import numpy as np

MIN_MMAP_BYTES = 2**20
"""Size in bytes from which an array is put into a memory-mapped file."""

ALIGNED = 64
"""Bytes that arrays inside of one file are aligned to, as an allocator's are."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GLIBC_MOST = 2**25
"""Bytes that glibc raises the second of these to by itself, and twice that for the first."""

_MAPS: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()
"""Files that are mapped, with their addresses."""


MIN_TRIM_BYTES = 2**25
"""Bytes by which a process grows before its freed blocks are worth to be looked for."""

_trimmed = 0
"""Bytes of this process that were in memory behind the last time, or less since."""

_OWN: list[bool] = []
"""Not empty where linexport may set options of this process's allocator."""


def own_process() -> None:
    """Say that this process is linexport's own: the program, or the child of a conversion.

    A host that uses the library keeps its allocator's options, which cannot be read nor restored.
    """
    _OWN.append(True)
    collect_rarely()


def collect_rarely() -> None:
    """Have Python look through everything it holds a tenth as often for cycles nobody refers to.

    It does so while modules are imported, which stay: a second of CPU when the program begins.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)


def trim_memory() -> None:
    """Return freed blocks (with glibc) and the pages of every memory-mapped array to the system.

    Blocks are left where the process has not grown by ``MIN_TRIM_BYTES`` since: glibc looks through
    all of them, and the pages it returns are cleared anew for the next who needs them.
    """
    global _trimmed
    for file in list(_MAPS):
        file.madvise(mmap.MADV_DONTNEED)
    resident = _resident()
    _trimmed = min(_trimmed, resident)
    if 0 < resident < _trimmed + MIN_TRIM_BYTES:
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return
    trim(0)
    _trimmed = _resident()


def _resident() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not say."""
    from pathlib import Path

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * mmap.PAGESIZE


@contextmanager
def low_memory() -> Iterator[None]:
    """Have glibc map every block from ``MIN_MMAP_BYTES`` on by itself, to be unmapped when freed.

    By default glibc does so with the first blocks only, and then keeps freed ones of up to 32 MB
    for later use, which fragments memory. The default returns when the context ends. The context
    has no effect in a process that is not linexport's own.
    """
    if not _OWN:
        yield
        return
    _own_from(MIN_MMAP_BYTES)
    try:
        yield
    finally:
        _own_from(_GLIBC_MOST)


def _own_from(size: int) -> None:
    """Have glibc map blocks of at least ``size`` bytes by themselves."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    set_option(_M_MMAP_THRESHOLD, size)
    set_option(_M_TRIM_THRESHOLD, 2 * size)


def release(address: int, size: int) -> None:
    """Drop the resident pages of these bytes, if they are memory-mapped."""
    for file, begin in list(_MAPS.items()):
        start, stop = max(address - begin, 0), min(address - begin + size, len(file))
        if start < stop:
            start -= start % mmap.PAGESIZE
            file.madvise(mmap.MADV_DONTNEED, start, stop - start)


def is_memory_mapped(address: int) -> bool:
    """Return whether an address is inside a memory-mapped file of this module."""
    return any(0 <= address - begin < len(file) for file, begin in list(_MAPS.items()))


def blocks(sizes: Sequence[int]) -> list[np.ndarray]:
    """Return memory-mapped uint8 arrays of these sizes (at least 1 byte each), aligned to pages.

    They are in plain memory where TMPDIR has no room for the file, or the system call is missing.
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


def mapped_file(path: Path) -> np.ndarray:
    """Return the bytes of a file, uint8, memory-mapped; they cannot be written."""
    import numpy as np

    with path.open("rb") as opened:
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(file, np.uint8)
    if hasattr(mmap, "MADV_DONTNEED"):
        _MAPS[file] = whole.ctypes.data
    return whole


def memory_mapped(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return copies of the arrays; those of at least ``MIN_MMAP_BYTES`` are memory-mapped."""
    import numpy as np

    places = iter(blocks([x.nbytes for x in arrays if x.nbytes >= MIN_MMAP_BYTES]))
    copies = []
    for values in arrays:
        if values.nbytes < MIN_MMAP_BYTES:
            copies.append(values.copy())
            continue
        block = next(places)
        copies.append(block.view(values.dtype).reshape(values.shape))
        np.copyto(copies[-1], values)
        release(block.ctypes.data, block.nbytes)
    return copies


def _mapped(size: int) -> mmap.mmap | None:
    """Return a mapped, unnamed file of ``size`` bytes, or None where the system offers none."""
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
