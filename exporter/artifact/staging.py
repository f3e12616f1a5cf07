"""Temporary folders next to an output, each held by a lock for as long as its process lives.

    .<output>.partial-<random>     one folder a run, with an advisory lock (flock) on it

A folder whose lock can be had belongs to a run that was killed: on this machine, in another
container or on another host of the same volume, where process ids mean nothing. Where the file
system has no such locks, no folder is taken for abandoned.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linexport.errors import EnvironmentProblemError
from linexport.system.folder_lock import lock
from linexport.system.room import FULL, MAKE_ROOM

ASIDE = ".old"
"""Ending of the name under which ``publish`` puts an earlier output aside, where it must."""

_UNWRITABLE = (*FULL, errno.EACCES, errno.EROFS, errno.EPERM)


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Make a temporary folder next to ``output``; remove it in the end whatever happens.

    ``write.publish`` moves it into place. Leftovers of runs that were killed are removed first.

    Raises:
        EnvironmentProblemError: the disk is full, or a file cannot be written.
    """
    parent = output.absolute().parent
    _remove_abandoned(output)
    named: list[Path] = []
    try:
        folder, descriptor = _make_locked(parent, _prefix(output), named)
        try:
            yield folder
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise _unwritable(error, f"the artifact to {parent}") from error
    finally:
        for folder in named:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in ``TMPDIR``, and remove it in the end.

    Raises:
        EnvironmentProblemError: the disk is full, or a file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        place = f"temporary files to {tempfile.gettempdir()}, which TMPDIR names"
        raise _unwritable(error, place) from error


def _unwritable(error: OSError, what: str) -> EnvironmentProblemError:
    advice = f" {MAKE_ROOM}" if error.errno in FULL else ""
    return EnvironmentProblemError(
        f"Cannot write {what}: {error.strerror}. What was there before is unchanged.{advice}"
    )


def _prefix(output: Path) -> str:
    return f".{output.name}.partial-"


def _remove_abandoned(output: Path) -> None:
    """Remove temporary folders that no process holds.

    An earlier output that was moved aside is kept while ``output`` does not exist.
    """
    for leftover in output.absolute().parent.glob(f"{glob.escape(_prefix(output))}*"):
        if leftover.name.endswith(ASIDE) and not output.exists():
            continue
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if lock(descriptor):
                    shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(descriptor)


def _make_locked(parent: Path, start: str, named: list[Path]) -> tuple[Path, int]:
    """Make a folder of a random name; return it and the descriptor that holds its lock.

    Its name is added to ``named`` before it is made: an interruption may come at any moment.
    Another run may take it for abandoned before it is locked, and remove it: then the next is made.
    """
    while True:
        folder = parent / f"{start}{secrets.token_hex(8)}"
        named.append(folder)
        folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if lock(descriptor) is not False and folder.exists():
            return folder, descriptor
        os.close(descriptor)
