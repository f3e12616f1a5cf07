"""The shared library of GPU kernels for ONNX Runtime's CUDA provider, and its registration.

    options = onnxruntime.SessionOptions()
    register(options)

A node that carries its kernels (``plugins.kernels.description``) is then launched through the CUDA
driver; without the library its function runs. A node's first output has the type of its first
input, and all others are in float32. Nothing is linked: the driver is opened with the first session
that has such a node. ``LINEXPORT_CUDA_LIBRARY=0`` in the environment leaves the library aside.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linexport.plugins import shared_library

if TYPE_CHECKING:
    import onnxruntime

SWITCH = "LINEXPORT_CUDA_LIBRARY"
TITLE = "CUDA library"

_FOLDER = Path(__file__).parent
_NAME = "liblinexport_cuda.so"


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


def version() -> str:
    """Return the digest of the sources that the library was built from.

    Raises:
        EnvironmentProblemError: as ``path``.
    """
    path()
    return sources_digest()


def register(options: onnxruntime.SessionOptions) -> bool:
    """Make sessions that are opened with these options use the library, where it can be used.

    Args:
        options: an ``onnxruntime.SessionOptions``.

    Returns:
        Whether it was registered.
    """
    file = find()
    if file is not None:
        options.register_custom_ops_library(str(file))
    return file is not None


def sources_digest() -> str:
    """Return the digest of the C++ sources, which the library carries as well."""
    return shared_library.digest(*source_folders())


def source_folders() -> list[Path]:
    """Return the folders of the C++ sources: its own, and what launches kernels."""
    plugins = _FOLDER.parent
    return [plugins / name / "cpp" for name in ("cuda", "kernels")]
