"""Opening an artifact's folder: one artifact, whole and unharmed, or an error.

    hold the folder -> signature -> manifest -> sizes, files -> graph -> session -> still the same?

``convert --overwrite`` swaps the folder for another in one step. A folder that is held open keeps
its number (inode), and renaming one sets the time of its last change (ctime): a swap in the
meantime is seen, one back and forth too, and all is read once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import onnx
from google.protobuf.message import DecodeError

from linexport import manifest as manifests
from linexport.artifact.folder_files import FolderFiles
from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.manifest import Manifest
from linexport.manifest.folder import MAX_BYTES
from linexport.sources.onnx_file.external import external_sizes
from linexport.sources.onnx_file.skeleton import skeleton, skeleton_of
from linexport.sources.onnx_file.structure import check_structure
from linexport.targets import listings

ATTEMPTS = 20
"""Times a folder is read that is replaced again and again."""

LARGEST_MODEL = 2**31
"""Bytes of an ONNX file: a message of protocol buffers has no more."""

LARGEST_OTHER = 2**30
"""Bytes of a file that no graph refers to, such as a tokenizer's."""

LARGEST_ENGINE = 2**34
"""Bytes of an engine beyond four times those of the models and their weights."""

SLACK = 2**16
"""Bytes that may follow the last weight in a file: some tools fill up their last page."""

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
    """Return numbers that change when a folder is renamed, or its files are."""
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def read_manifest(files: FolderFiles) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        UsageError: see ``linexport.manifest.read``; or its target is not one of this installation.
    """
    if not manifests.has_manifest(files.folder):
        return manifests.read(files.folder)  # says what is missing
    content = files.content(manifests.MANIFEST, MAX_BYTES)
    manifest = manifests.parse(content, files.folder / manifests.MANIFEST)
    if manifest.target not in (known := listings()):
        raise UsageError(
            f"{files.folder} is for the target {manifest.target!r}; expected one of "
            f"{', '.join(known)}. Install the package that adds its target, or convert the model "
            "again."
        )
    return manifest


def read_graph(files: FolderFiles, name: str) -> onnx.ModelProto:
    """Read the graph of one of an artifact's models; see ``checked_graph``."""
    return checked_graph(files.folder / name, files.content(name, LARGEST_MODEL))


def check_files(files: FolderFiles, manifest: Manifest) -> dict[str, onnx.ModelProto]:
    """Compare the artifact's files with the sizes and digests in its manifest.

    Models come first: they say how long the files of their weights are, and a longer file is
    refused unread.

    Returns:
        The graphs of all models by the names of their files, without weights.

    Raises:
        UsageError: a file is missing, damaged, larger than it may be, or has no digest; or a graph
            reads one that is not listed.
        EnvironmentProblemError: see ``checked_graph``.
    """
    submodels = [one.file for one in (manifest.vision, manifest.mtp) if one is not None]
    models = [manifests.MODEL, *submodels]
    for name in models:
        _check_size(files, name, manifest.files[name].bytes, LARGEST_MODEL)
        files.content(name, LARGEST_MODEL)
        _check_digest(files, name, manifest.files[name].sha256)
    graphs = {name: read_graph(files, name) for name in models}
    for name, graph in graphs.items():
        check_listed(files.folder / name, graph, manifest)
    limits = _limits(manifest, graphs)
    others = {name: file for name, file in manifest.files.items() if name not in models}
    for name, file in others.items():
        _check_size(files, name, file.bytes, limits.get(name, LARGEST_OTHER))
    for name, file in others.items():
        _check_digest(files, name, file.sha256)
    return graphs


def check_listed(model: Path, graph: onnx.ModelProto, manifest: Manifest) -> None:
    """Check that every file with weights of a model is one of the artifact's.

    Raises:
        UsageError: one is not.
    """
    for name in external_sizes(graph):
        if name not in manifest.files:
            raise UsageError(
                f"{model} reads weights from {name}, which is not among the files of the manifest: "
                "nothing says what they are. Convert the model again."
            )


def _limits(manifest: Manifest, graphs: Mapping[str, onnx.ModelProto]) -> dict[str, int]:
    """Return the most bytes of each file that may be large, by its name."""
    found: dict[str, int] = {}
    for graph in graphs.values():
        for name, size in external_sizes(graph).items():
            found[name] = max(found.get(name, 0), size + SLACK)
    weights = sum(manifest.files[name].bytes for name in {*found, *graphs})
    engines = (engine.file for engine in manifest.engines)
    return {**dict.fromkeys(engines, 4 * weights + LARGEST_ENGINE), **found}


def _check_size(files: FolderFiles, name: str, expected: int, most: int) -> None:
    found = files.size(name)
    if found != expected:
        raise UsageError(
            f"{files.folder / name} is damaged: found {found} bytes, expected {expected}. "
            "Convert the model again."
        )
    if found > most:
        raise UsageError(
            f"{files.folder / name} has {found:,} bytes; at most {most:,} are read. "
            "Convert the model again."
        )


def _check_digest(files: FolderFiles, name: str, expected: str | None) -> None:
    if expected is None:
        raise UsageError(
            f"{files.folder / manifests.MANIFEST} has no SHA-256 of {name}, as those of early "
            "versions had none. Convert the model again."
        )
    found = files.digest(name)
    if found != expected:
        raise UsageError(
            f"{files.folder / name} is damaged: its SHA-256 is {found}, expected {expected}. "
            "Convert the model again."
        )


def checked_graph(model: Path, content: bytes | None = None) -> onnx.ModelProto:
    """Read the graph of an artifact without its weights, checked as that of a source is.

    Args:
        model: its file.
        content: of the file; None to read it.

    Raises:
        UsageError: ``check_structure`` refuses it, or it is a folder or a device.
        EnvironmentProblemError: it is not an ONNX file.
    """
    try:
        if model.exists() and not model.is_file():
            raise UsageError(f"{model} is not a file. Convert the model again.")
        graph = skeleton(model) if content is None else skeleton_of(content)
        check_structure(model, graph)
    except (OSError, DecodeError) as error:
        raise EnvironmentProblemError(f"Cannot open {model}: {error}") from None
    except UnsupportedModelError as error:
        raise UsageError(
            f"{model} is not opened: {error}. linexport did not write it so; convert the model "
            "again."
        ) from None
    return graph
