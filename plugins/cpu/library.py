"""The shared library of CPU operators: where it is, whether it can be used, and its registration.

    options = onnxruntime.SessionOptions()
    register(options, threads=0)

ONNX Runtime prefers a registered operator to the function that a node carries, so the same file
runs either way. ``LINEXPORT_CPU_LIBRARY=0`` in the environment leaves the library aside.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from linexport.errors import EnvironmentProblemError

SWITCH = "LINEXPORT_CPU_LIBRARY"
THREADS = "linexport.threads"
"""Entry of a session's configuration: how many threads its pool has, which ONNX Runtime does not
tell operators. Without it they assume one for each core of the process."""

OPS = frozenset({"CausalConvWithState", "GeneralizedDeltaRule", "LinearAttention", "StabilizedExp"})
"""Ops of the domain that it computes; others run by their functions beside it."""

INSTALL = "pip install --force-reinstall --no-deps linexport  (where g++ or clang++ is installed)"

_ELF = struct.Struct("<32xQ14xHH6x")
"""Header of a file: place of its table of segments, size of an entry, and how many there are."""

_SEGMENT = struct.Struct("<8xQ16xQ16x")
"""Entry of that table: place of a segment in the file, and its bytes there."""

_FOLDER = Path(__file__).parent
_NAME = "liblinexport_cpu.so"


def path() -> Path:
    """Return the library's file.

    Raises:
        EnvironmentProblemError: it was not built, does not load, or is of another version; the
            message says how to build it.
    """
    file = _FOLDER / _NAME
    problem = _problem(file)
    if problem:
        raise EnvironmentProblemError(f"{problem}. Build it: {INSTALL}")
    return file


def find() -> Path | None:
    """Return the library's file, or None where it is missing, unusable or switched off."""
    if os.environ.get(SWITCH) == "0":
        return None
    file = _FOLDER / _NAME
    return None if _problem(file) else file


def computes(ops: Iterable[str]) -> bool:
    """Return whether it computes any of these ops, given by name."""
    return not OPS.isdisjoint(ops)


def register(options: Any, threads: int = 0) -> bool:
    """Make sessions that are opened with these options use the library, where it can be used.

    Args:
        options: an ``onnxruntime.SessionOptions``.
        threads: of the session's pool; 0 where that is ONNX Runtime's choice.

    Returns:
        Whether it was registered.
    """
    file = find()
    if file is None:
        return False
    if threads > 0:
        options.add_session_config_entry(THREADS, str(threads))
    options.register_custom_ops_library(str(file))
    return True


def instruction_set() -> str:
    """Return the name of the vector instructions that kernels use on this machine.

    Raises:
        EnvironmentProblemError: as ``path``.
    """
    library = ctypes.CDLL(str(path()))
    library.linexport_instruction_set.restype = ctypes.c_char_p
    return str(library.linexport_instruction_set().decode())


@cache
def _problem(file: Path) -> str:
    """Return why the library cannot be used, "" where it can."""
    if not file.is_file():
        return "The CPU library was not built when linexport was installed"
    if _is_cut(file.read_bytes()):
        return f"{file} is damaged: its end is missing"
    try:
        library = ctypes.CDLL(str(file))
        entries = library.RegisterCustomOps, library.linexport_sources
    except (OSError, UnicodeError) as error:  # the latter of a damaged name in its message
        return f"{file} does not load on this machine: {error}"
    except AttributeError as error:
        return f"{file} is not linexport's CPU library: {error}"
    entries[1].restype = ctypes.c_char_p
    built, expected = entries[1]().decode(), sources_digest()
    if built != expected:
        return f"{file} is of another version: its sources are {built}, expected {expected}"
    return ""


def _is_cut(content: bytes) -> bool:
    """Return whether a 64-bit ELF file has segments beyond its end, on which loading it crashes."""
    if content[:6] != b"\x7fELF\2\1" or len(content) < _ELF.size:
        return False
    table, size, count = _ELF.unpack_from(content)
    if table + size * count > len(content) or size < _SEGMENT.size:
        return True
    segments = (_SEGMENT.unpack_from(content, table + size * i) for i in range(count))
    return any(offset + length > len(content) for offset, length in segments)


def sources_digest() -> str:
    """Return the digest of the C++ sources, which the library carries as well."""
    files = sorted((_FOLDER / "cpp").iterdir())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
