"""Files of an artifact's folder: the bytes that were hashed are those that run.

    content(name)       read once, into memory that nobody else writes; its digest is of these bytes
    digest(name)        of them, or of a file that is mapped into memory afterwards
    check_unchanged()   files that others read are those that were hashed: number, size and times

A file system counts time in steps. A file that was changed within the last step is hashed after it,
so that whatever changes it from then on gives it another time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from linexport.errors import UsageError

STEP = 0.02
"""Seconds, more than a step of the time of files: 10 ms at most on Linux."""

AT_ONCE = 2**20
"""Bytes that are hashed at once."""

FILLED = 8
"""Files of more than ``AT_ONCE`` bytes have one in so many of them stored, at least."""

Identity = tuple[int, ...]


class FolderFiles:
    """The files of one folder.

    Args:
        folder: of an artifact.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contents: dict[str, bytes] = {}
        self._digests: dict[str, str] = {}
        self._identities: dict[str, Identity] = {}

    def names(self) -> list[str]:
        """Return the names of everything in the folder, in order."""
        return sorted(os.listdir(self.folder))  # noqa: PTH208 names alone

    def size(self, name: str) -> int:
        """Return the bytes of a file.

        Raises:
            UsageError: it is missing, not a file, or elsewhere.
        """
        return _status(self._path(name)).st_size

    def content(self, name: str, most: int) -> bytes:
        """Return the content of a file.

        Args:
            name: of the file.
            most: bytes that are read.

        Raises:
            UsageError: see ``size``; it has more bytes, or is not what was hashed before.
        """
        if name not in self._contents:
            path = self._path(name)
            self._identities[name] = _settled(path)
            with _opened(path) as descriptor:
                found = os.fstat(descriptor).st_size
                if found > most:
                    raise UsageError(f"{path} has {found:,} bytes; at most {most:,} are read.")
                with open(descriptor, "rb", closefd=False) as file:
                    content = file.read(found)
            digest = hashlib.sha256(content).hexdigest()
            if self._digests.setdefault(name, digest) != digest:
                raise _changing(path)
            self._contents[name] = content
        return self._contents[name]

    def release(self, name: str) -> None:
        """Forget the content of a file; its digest is kept."""
        self._contents.pop(name, None)

    def kept(self) -> frozenset[str]:
        """Return the names of the files whose content is in memory."""
        return frozenset(self._contents)

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file in hexadecimal.

        Raises:
            UsageError: see ``size``; or it is being changed.
        """
        if name not in self._digests:
            path = self._path(name)
            self._identities[name] = _settled(path)
            self._digests[name] = _digest(path, self._identities[name])
        return self._digests[name]

    def check_unchanged(self, but: Collection[str] = (), *, linked: bool = False) -> None:
        """Check that the files are still those that were read.

        Args:
            but: files whose content alone was used.
            linked: files may have got further names meanwhile, which changes one of their times:
                such a file is hashed again.

        Raises:
            UsageError: one was changed or replaced since.
        """
        for name, identity in self._identities.items():
            path = self._path(name)
            found = _identity(_status(path))
            if name in but or found == identity:
                continue
            same = linked and found[:-1] == identity[:-1]
            if not same or _digest(path, _settled(path)) != self._digests[name]:
                raise _changing(path)

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if path.parent != self.folder or name in ("", ".", ".."):
            raise UsageError(f"{self.folder} names {name!r}, which is elsewhere.")
        return path


def _changing(path: Path) -> UsageError:
    return UsageError(
        f"{path} was changed while it was used. Give the artifact a folder that nobody writes to, "
        "and try again."
    )


def _status(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except (OSError, ValueError):
        raise UsageError(f"{path} is missing. Convert the model again.") from None
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is not a file. Convert the model again.")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading, and nothing that would be waited for."""
    _status(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{path} is not a file. Convert the model again.")
        _check_filled(path, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_filled(path: Path, descriptor: int) -> None:
    """Refuse a file that is hardly more than its length: it takes no room, and hours to hash.

    File systems that have no files with holes say that there are none.
    """
    size = os.fstat(descriptor).st_size
    if size <= AT_ONCE:
        return
    stored = end = 0
    try:
        while stored * FILLED < size and end < size:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            stored += end - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # which says that there is nothing but a hole
            return
    os.lseek(descriptor, 0, os.SEEK_SET)
    if stored * FILLED < size:
        raise UsageError(
            f"{path} has {size:,} bytes, of which {stored:,} are stored: the rest is a hole, which "
            "no file of an artifact has. Convert the model again."
        )


def _settled(path: Path) -> Identity:
    """Return the identity of a file once a change would give it another one."""
    found = _status(path)
    if 0 <= time.time() - found.st_ctime < STEP:
        time.sleep(STEP)
        found = _status(path)
    return _identity(found)


@lru_cache(maxsize=1024)
def _digest(path: Path, identity: Identity) -> str:
    """Hash a file, once for as long as it is not touched."""
    with _opened(path) as descriptor:
        if _identity(os.fstat(descriptor)) != identity:
            raise _changing(path)
        found, left = hashlib.sha256(), os.fstat(descriptor).st_size
        while left > 0 and (part := os.read(descriptor, min(left, AT_ONCE))):
            found.update(part)
            left -= len(part)
        if _identity(os.fstat(descriptor)) != identity:
            raise _changing(path)
    return found.hexdigest()


def _identity(found: os.stat_result) -> Identity:
    """Return numbers that change when a file is changed, moved or replaced."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
