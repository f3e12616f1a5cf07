"""Shared libraries of operators for ONNX Runtime: whether the file that was built can be used."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
from functools import cache
from pathlib import Path

from linexport.errors import EnvironmentProblemError
from linexport.system.install import pip_install

INSTALL = (
    f"{pip_install(options='--force-reinstall --no-deps')}  (where g++ or clang++ is installed)"
)

_ELF = struct.Struct("<18xH12xQ14xHH6x")
"""Header of a file: its architecture, place of its table of segments, size of an entry, and how
many there are."""

_ARCHITECTURES = {62: "x86_64", 183: "aarch64"}

_SEGMENT = struct.Struct("<8xQ16xQ16x")
"""Entry of that table: place of a segment in the file, and its bytes there."""


def checked(file: Path, title: str, expected: str) -> Path:
    """Return the file of a library that can be used; arguments are those of ``problem``.

    Raises:
        EnvironmentProblemError: it cannot; the message says how to build it.
    """
    found = problem(file, title, expected)
    if found:
        raise EnvironmentProblemError(f"{found}. Build it: {INSTALL}")
    return file


def usable(file: Path, title: str, expected: str, switch: str) -> Path | None:
    """Return the file of a library; None where it cannot be used or is switched off.

    Args:
        file: as the next ones, see ``problem``.
        title: see there.
        expected: see there.
        switch: environment variable that is 0 where users want the library left aside.
    """
    if os.environ.get(switch) == "0" or problem(file, title, expected):
        return None
    return file


@cache
def digest(*folders: Path) -> str:
    """Return the digest of the C++ sources in these folders, which a library carries as well.

    They are read once: every model that is opened asks for it.
    """
    files = [file for folder in folders for file in sorted(folder.iterdir())]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@cache
def problem(file: Path, title: str, expected: str) -> str:
    """Return why a library of ours cannot be used, "" where it can.

    Args:
        file: of the library.
        title: what users call it.
        expected: digest of its sources.
    """
    if not file.is_file():
        return f"The {title} was not built when linexport was installed"
    damage = _damage(file.read_bytes())
    if damage:
        return f"{file} {damage}"
    try:
        library = ctypes.CDLL(str(file))
        entries = library.RegisterCustomOps, library.linexport_sources
    except (OSError, UnicodeError) as error:  # the latter of a damaged name in its message
        return f"{file} does not load on this machine: {error}"
    except AttributeError as error:
        return f"{file} is not linexport's {title}: {error}"
    entries[1].restype = ctypes.c_char_p
    built = entries[1]().decode()
    if built != expected:
        return f"{file} is of another version: its sources are {built}, expected {expected}"
    return ""


def _damage(content: bytes) -> str:
    """Return why a 64-bit ELF file cannot be loaded; the system's loader would crash or mislead."""
    if content[:6] != b"\x7fELF\2\1" or len(content) < _ELF.size:
        return ""
    architecture, table, size, count = _ELF.unpack_from(content)
    built, here = _ARCHITECTURES.get(architecture), platform.machine()
    if built and built != here:
        return f"was built for {built}, and this machine is {here}"
    cut = "is damaged: its end is missing"
    if table + size * count > len(content) or size < _SEGMENT.size:
        return cut
    segments = (_SEGMENT.unpack_from(content, table + size * i) for i in range(count))
    return cut if any(offset + length > len(content) for offset, length in segments) else ""
