"""Writing an artifact so that an interruption leaves the earlier one or none, never half of one."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import onnx

from linexport.artifact.staging import ASIDE, staged
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import external_data
from linexport.manifest import DATA, MODEL, is_artifact
from linexport.sources.files import check_link, check_text
from linexport.system.replace_file import replacing

__all__ = [
    "check_apart",
    "check_output",
    "copy_files",
    "publish",
    "replace_text",
    "save_model",
    "staged",
]

EXTERNAL_ABOVE = 2**26
"""Bytes above which weights go to a file of their own, which is mapped into memory where those
inside of a model are copied there, up to four times, to places that are not aligned: a step of a
model of 346 MB in 4 bits took 1.4 times as long."""

ONE_FILE = 2**31 - 2**20
"""Bytes of a protobuf with all weights inside."""

SMALLEST = 2**10
"""Bytes of the smallest weight that goes there with the others."""


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        UsageError: its name is not text; it is a file, a folder that is not an artifact or that
            nothing can take the place of, or an artifact, and replacing it is not allowed.
        EnvironmentProblemError: nothing can be written there.
    """
    check_text(output)
    try:
        _check_kind(output, overwrite)
        parent = output.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with staged(output):
            pass
    except OSError as error:
        raise EnvironmentProblemError(f"Cannot write to {output}: {error.strerror}.") from None


def _check_kind(output: Path, overwrite: bool) -> None:
    if output.name in ("", "..") or output.is_mount():
        raise UsageError(
            f"{output} cannot be replaced as a whole. Name a folder in it, such as "
            f"{output / 'artifact'}."
        )
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"{output} is not a folder; expected one to write the artifact to.")
    if output.is_dir() and any(output.iterdir()):
        if not is_artifact(output):
            raise UsageError(
                f"{output} is a folder with other things in it; expected a new or empty folder, "
                "or an artifact to replace."
            )
        if not overwrite:
            raise UsageError(
                f"{output} holds an artifact already. Pass --overwrite to replace it once the new "
                "one is complete, or choose another folder."
            )


def check_apart(output: Path, source: str | Path) -> None:
    """Refuse an output whose writing would take away what it is made of.

    Args:
        output: the file or folder to be replaced.
        source: what is read; a name that is not a path never overlaps.

    Raises:
        UsageError: the output is the source, or holds it.
    """
    try:
        place, origin = output.resolve(), Path(source).resolve(strict=True)
    except (OSError, ValueError):  # ``package.module:callable``, or nothing: said elsewhere
        return
    if place == origin or place in origin.parents:
        what = "the source itself" if place == origin else f"where the source {source} is"
        raise UsageError(
            f"{output} is {what}, and the new one would take its place. Choose another output."
        )


def publish(folder: Path, output: Path) -> None:
    """Put a staged folder in the place of ``output`` in one step."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    if output.is_dir() and not any(output.iterdir()):
        output.rmdir()
    if output.exists():
        _exchange(folder, output.absolute())
    else:
        folder.rename(output.absolute())
    _sync(output.absolute().parent)


def replace_text(path: Path, text: str) -> None:
    """Replace one file of an artifact in one step."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
        _sync(partial)


def save_model(
    model: onnx.ModelProto,
    folder: Path,
    weights: external_data.Weights | None = None,
    above: int | None = None,
    names: tuple[str, str] = (MODEL, DATA),
) -> Path:
    """Write ``model.onnx``; returns its path.

    Args:
        model: its own large weights are taken out of it.
        folder: to write to.
        weights: those that are not in the model.
        above: bytes from which all weights go to a data file; None: those of artifacts.
        names: of the model's file, and of its data file.
    """
    path, data = (folder / name for name in names)
    size = model.ByteSize() + sum(values.nbytes for values in (weights or {}).values())
    external = size > (EXTERNAL_ABOVE if above is None else above)
    found = {
        **(weights or {}),
        **external_data.externalize(model, SMALLEST if external else external_data.LARGE),
    }
    data.unlink(missing_ok=True)
    external_data.save(model, found, path, data if external else None)
    return path


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files that belong to the model into its folder.

    Raises:
        UsageError: one is a symbolic link that leads out of its folder.
    """
    for path in files:
        check_link(path)
        shutil.copyfile(path, folder / path.name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders; afterwards ``new`` names the old content.

    Linux swaps names in one system call. Elsewhere two renames must do; a kill between them leaves
    the old artifact under the name of the temporary folder plus ``.old``.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        rename = None
    at_cwd, exchange = -100, 2
    if rename and rename(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), exchange) == 0:
        return
    aside = new.with_name(f"{new.name}{ASIDE}")
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
