"""Opening an artifact's folder: one artifact, whole and unharmed, or an error.

    hold the folder -> manifest -> signature -> files -> graph -> session -> still the same folder?

``convert --overwrite`` swaps the folder for another in one step. A folder that is held open keeps
its number (inode), and renaming one sets the time of its last change (ctime): a swap in the
meantime is seen, one back and forth too, and all is read once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import onnx
from google.protobuf.message import DecodeError

from linexport import manifest as manifests
from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.loaders.onnx_file.skeleton import skeleton
from linexport.loaders.onnx_file.structure import check_structure
from linexport.manifest import Manifest

ATTEMPTS = 20
"""Times a folder is read that is replaced again and again."""

Opened = TypeVar("Opened")


def steadily(folder: Path, read: Callable[[], Opened]) -> Opened:
    """Call ``read`` until the folder was the same before and after, and return what it found.

    Raises:
        UsageError: it never was.
        Exception: what ``read`` raises of a folder that was not replaced meanwhile.
    """
    for _ in range(ATTEMPTS):
        try:
            held = os.open(folder, os.O_RDONLY)
        except (OSError, ValueError):  # there is none, which ``read`` says better
            return read()
        try:
            before = _identity(os.fstat(held))
            found = read()
            if _is(folder, before):
                return found
        except Exception:
            if _is(folder, before):
                raise
        finally:
            os.close(held)
    raise UsageError(f"{folder} is being replaced over and over. Open it when that has ended.")


def _is(folder: Path, identity: tuple[int, ...]) -> bool:
    try:
        return _identity(folder.stat()) == identity
    except OSError:
        return False


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change when a file is touched or a folder renamed."""
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the artifact's files with the sizes and digests in its manifest.

    Raises:
        UsageError: one is missing or damaged.
    """
    for name, file in manifest.files.items():
        path = folder / name
        if path.parent != folder:
            raise UsageError(f"{folder / manifests.MANIFEST} names {name!r}, which is elsewhere.")
        if not path.is_file():
            state = "not a file" if path.exists() else "missing"
            raise UsageError(f"{path} is {state}. Convert the model again.")
        found = path.stat().st_size
        if found != file.bytes:
            raise UsageError(
                f"{path} is damaged: found {found} bytes, expected {file.bytes}. "
                "Convert the model again."
            )
    digests = {name: file.sha256 for name, file in manifest.files.items()}
    for name, expected in {**digests, manifests.MODEL: manifest.model_sha256}.items():
        if expected is not None and _digest_once(folder / name) != expected:
            raise UsageError(
                f"{folder / name} is damaged: its SHA-256 is {_digest_once(folder / name)}, "
                f"expected {expected}. Convert the model again."
            )


def _digest_once(path: Path) -> str:
    """Return the SHA-256 of a file, computed once for as long as the file is not touched."""
    try:
        return _digest(path, _identity(path.stat()))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing. Convert the model again.") from None


@lru_cache(maxsize=1024)
def _digest(path: Path, identity: tuple[int, ...]) -> str:
    return manifests.digest(path)


def checked_graph(model: Path) -> onnx.ModelProto:
    """Read the graph of an artifact without its weights, checked as that of a source is.

    Raises:
        UsageError: ``check_structure`` refuses it, or it is a folder or a device.
        EnvironmentProblemError: it is not an ONNX file.
    """
    try:
        if model.exists() and not model.is_file():
            raise UsageError(f"{model} is not a file. Convert the model again.")
        graph = skeleton(model)
        check_structure(model, graph)
    except (OSError, DecodeError) as error:
        raise EnvironmentProblemError(f"Cannot open {model}: {error}") from None
    except UnsupportedModelError as error:
        raise UsageError(
            f"{model} is not opened: {error}. linexport did not write it so; convert the model "
            "again."
        ) from None
    return graph
