"""A shared library without code: a name (SONAME), and the libraries it needs.

    strings, one empty symbol, its hash table, the dynamic section:
    DT_NEEDED ..., DT_SONAME, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_NULL

The dynamic loader resolves a later ``dlopen`` of the same name to a library that is loaded already,
and looks its symbols up in what it needs. So a library that is installed under one name can be had
under another, without write access to its folder, without a compiler, and within a process that
has begun. Source: the System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from linexport.errors import EnvironmentProblemError

MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's numbers of the 64-bit Linux machines TensorRT exists for."""

HEADER, PROGRAM_HEADER, SYMBOL, ENTRY = 64, 56, 24, 16
"""Bytes of the ELF header, a program header, a symbol and an entry of the dynamic section."""

NULL, NEEDED, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 0, 1, 4, 5, 6, 10, 11, 14
LOAD, DYNAMIC = 1, 2
READ_WRITE = 6
PAGE = 0x10000
"""The largest page size of these machines; the loader wants segments aligned to it."""


def image(name: str, needed: Sequence[str], machine: int) -> bytes:
    """The file of a library called ``name`` that needs the libraries ``needed``."""
    strings = b"\0"
    places = []
    for text in (name, *needed):
        places.append(len(strings))
        strings += text.encode() + b"\0"
    symbols_at = HEADER + 2 * PROGRAM_HEADER
    hash_at = symbols_at + SYMBOL
    # One bucket, one chain entry, both the empty symbol.
    hashes = struct.pack("<4I", 1, 1, 0, 0)
    dynamic_at = hash_at + len(hashes)
    entries = len(needed) + 7
    strings_at = dynamic_at + entries * ENTRY
    table = [
        *((NEEDED, place) for place in places[1:]),
        (SONAME, places[0]),
        (HASH, hash_at),
        (STRTAB, strings_at),
        (SYMTAB, symbols_at),
        (STRSZ, len(strings)),
        (SYMENT, SYMBOL),
        (NULL, 0),
    ]
    assert len(table) == entries
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in table)
    size = strings_at + len(strings)
    identity = struct.pack("<4s5B7x", b"\x7fELF", 2, 1, 1, 0, 0)
    header = identity + struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, HEADER, 0, 0, HEADER, PROGRAM_HEADER, 2, 64, 0, 0
    )
    whole = _segment(LOAD, 0, size, PAGE)
    inner = _segment(DYNAMIC, dynamic_at, len(dynamic), 8)
    return header + whole + inner + bytes(SYMBOL) + hashes + dynamic + strings


def _segment(kind: int, start: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, READ_WRITE, start, start, start, size, size, alignment)


def provide(name: str, library: str) -> None:
    """Make ``dlopen(name)`` find ``library``, in this process and for its whole life.

    Does nothing where ``name`` can be had already.

    Raises:
        EnvironmentProblemError: not a machine TensorRT exists for, or ``library`` is not loaded and
            cannot be.
    """
    if _loads(name):
        return
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise EnvironmentProblemError(
            f"This machine is a {platform.machine()}; TensorRT exists for {', '.join(MACHINES)}."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(image(name, [library], machine))
        try:
            ctypes.CDLL(str(path))  # never unloaded; the file is not needed once it is mapped
        except OSError as error:
            raise EnvironmentProblemError(f"Cannot load {library}: {error}.") from None
    if not _loads(name):
        raise EnvironmentProblemError(f"The dynamic loader does not find {name}.")


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
