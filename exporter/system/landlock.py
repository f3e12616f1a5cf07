"""Landlock of Linux: this process and its children open files beneath named folders only.

    read and list    beneath the readable ones and the writable ones
    write, make ...  beneath the writable ones, and /dev/null

Nothing heavy is imported: whoever confines itself wants one thread.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READS = _READ_FILE | _READ_DIR
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Writing, removing and making files; REFER and TRUNCATE came with versions 2 and 3."""
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
"""Rights that a rule for a single file may give."""


def restrict(readable: Sequence[Path], writable: Sequence[Path]) -> bool:
    """Restrict this process for good, which must not be able to gain privileges.

    Args:
        readable: files and folders; those that are not there are left out.
        writable: folders, which are read as well.

    Returns:
        Whether the kernel does so.
    """
    syscall = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
    version = -1 if syscall is None else syscall(_CREATE, None, 0, _VERSION)
    if syscall is None or version < 1:
        return False
    truncate = _TRUNCATE if version >= 3 else 0
    handled = _READS | _WRITES | truncate | (1 << 13 if version >= 2 else 0)
    rules = struct.pack("=Q", handled)
    ruleset = syscall(_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return False
    for path, rights in [
        *((path, _READS) for path in readable),
        *((path, handled) for path in writable),
        (Path(os.devnull), _READ_FILE | _WRITE_FILE | truncate),
    ]:
        with suppress(OSError):
            _allow(syscall, ruleset, path, rights)
    done = syscall(_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return bool(done)


def _allow(syscall: ctypes._NamedFuncPointer, ruleset: int, path: Path, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    syscall(_ADD, ruleset, _BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)
