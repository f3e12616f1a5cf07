"""Refusals that name the file, SHA-256, and where a symbolic link may lead."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from linexport.errors import UnsupportedModelError, UsageError

FACTORY_ADVICE = (
    "write a function without arguments that returns (module, example_args) and pass it as "
    "package.module:callable"
)


def refuse(path: Path, found: str, advice: str) -> UnsupportedModelError:
    """The error for a file that is not converted: what it is, then what to do."""
    return UnsupportedModelError(f"{path}: {found}. {advice[0].upper()}{advice[1:]}.")


def unreadable(path: Path, error: OSError) -> UsageError:
    """The error for something the operating system does not let us read."""
    reason = error.strerror or str(error)
    return UsageError(f"cannot read {path}: {reason}. Check that it is there and its permissions.")


def sha256(path: Path) -> str:
    """SHA-256 of the file, in hexadecimal.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def check_text(path: str | Path) -> None:
    """Refuse a path that cannot be written to a manifest or a report.

    Raises:
        UsageError: it has bytes that are not text in the encoding of file names.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"The path {str(path)!a} is not text in the encoding of file names here "
            f"({sys.getfilesystemencoding()}). Rename it, or set a UTF-8 locale, such as "
            "LC_ALL=C.UTF-8."
        ) from None


def check_link(path: Path) -> None:
    """Refuse a symbolic link out of its folder.

    Links inside the folder may be followed, and those of a snapshot in the Hugging Face cache to
    the blobs of its model, from one folder deeper too:
    ``models--name/snapshots/<revision>/<file> -> ../../blobs/<digest>``.

    Raises:
        UsageError: the link leads elsewhere.
    """
    folder, target = path.parent.resolve(), path.resolve()
    allowed = [folder]
    for snapshot in (folder, folder.parent):  # a module of a model may be in a folder of its own
        if snapshot.parent.name == "snapshots":
            allowed.append(snapshot.parent.parent / "blobs")
    if not any(place in target.parents for place in allowed):
        raise UsageError(
            f"{path} is a symbolic link to {target}, outside its folder. Its content would be "
            "copied into the artifact: put the file itself in the place of the link, or delete it."
        )


def first_line(error: BaseException, limit: int = 300) -> str:
    """The type of an exception and the first line of its message, cut to `limit` characters.

    A line that ends in a colon is returned with the one after it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
