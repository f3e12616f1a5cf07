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
import platform
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import EnvironmentProblemError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx

SWITCH = "LINEXPORT_CPU_LIBRARY"
THREADS = "linexport.threads"
"""Entry of a session's configuration: how many threads its pool has, which ONNX Runtime does not
tell operators. Without it they assume one for each core of the process."""

OPS = frozenset(
    {
        "CausalConvWithState",
        "GeneralizedDeltaRule",
        "LinearAttention",
        "MixtureOfExperts",
        "StabilizedExp",
    }
)
"""Ops of the domain that it computes; others run by their functions beside it."""

INSTALL = "pip install --force-reinstall --no-deps linexport  (where g++ or clang++ is installed)"

_ELF = struct.Struct("<18xH12xQ14xHH6x")
"""Header of a file: its architecture, place of its table of segments, size of an entry, and how
many there are."""

_ARCHITECTURES = {62: "x86_64", 183: "aarch64"}

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


def check_nodes(model: onnx.ModelProto) -> None:
    """Check that nodes of its ops are of this version, with attributes of the ops and their types.

    ONNX Runtime tells an operator neither: the library would read the attributes that it knows, and
    take the default for one of another type.

    Raises:
        UnsupportedModelError: the domain has another version, or a node such an attribute.
    """
    from onnx import AttributeProto
    from onnx.defs import OpSchema

    from linexport.plugins.ops.op import ABSENT, DOMAIN, VERSION
    from linexport.plugins.ops.registry import own_ops

    for imported in model.opset_import:
        if imported.domain == DOMAIN and imported.version != VERSION:
            raise UnsupportedModelError(
                f"The model has version {imported.version} of the domain {DOMAIN}; the CPU library "
                f"computes version {VERSION}"
            )
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in OPS:
            continue
        known = own_ops()[node.op_type].schema.attributes
        for attribute in node.attribute:
            declared = known.get(attribute.name)
            name = AttributeProto.AttributeType.Name(attribute.type)
            if attribute.name != ABSENT and (
                declared is None or declared.type != getattr(OpSchema.AttrType, name, None)
            ):
                raise UnsupportedModelError(
                    f"{node.op_type} {node.name} has the attribute {attribute.name}, which the CPU "
                    f"library does not know in that form; known: {', '.join(sorted(known))}"
                )


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
    damage = _damage(file.read_bytes())
    if damage:
        return f"{file} {damage}"
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


def sources_digest() -> str:
    """Return the digest of the C++ sources, which the library carries as well."""
    files = sorted((_FOLDER / "cpp").iterdir())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
