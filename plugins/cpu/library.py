"""The shared library of CPU operators: where it is, whether it can be used, and its registration.

    options = onnxruntime.SessionOptions()
    register(options, threads=0)

ONNX Runtime prefers a registered operator to the function that a node carries, so the same file
runs either way. ``LINEXPORT_CPU_LIBRARY=0`` in the environment leaves the library aside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.errors import UnsupportedModelError
from linexport.plugins import shared_library

if TYPE_CHECKING:
    import onnx
    import onnxruntime

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
        "WindowAttention",
    }
)
"""Ops of the domain that it computes; others run as ONNX functions."""

FUSED_DOMAIN = "linexport.cpu"
"""Domain of the nodes that are made of several for it while a model is opened: no file has any."""

TITLE = "CPU library"

_FOLDER = Path(__file__).parent
_NAME = "liblinexport_cpu.so"


def path() -> Path:
    """Return the library's file.

    Raises:
        EnvironmentProblemError: it was not built, does not load, or is of another version; the
            message says how to build it.
    """
    return shared_library.checked(_FOLDER / _NAME, TITLE, sources_digest())


def find() -> Path | None:
    """Return the library's file, or None where it is missing, unusable or switched off."""
    return shared_library.usable(_FOLDER / _NAME, TITLE, sources_digest(), SWITCH)


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


def register(options: onnxruntime.SessionOptions, threads: int = 0) -> bool:
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
def multiplies_integers() -> bool:
    """Return whether it has products of integers for this machine, which needs AVX2 or AVX-512.

    Raises:
        EnvironmentProblemError: as ``path``.
    """
    return bool(ctypes.CDLL(str(path())).linexport_multiplies_integers())


def sources_digest() -> str:
    """Return the digest of the C++ sources, which the library carries as well."""
    return shared_library.digest(_FOLDER / "cpp")
