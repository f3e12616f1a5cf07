"""The manifest of an artifact folder, and digests of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest import json_text
from linexport.manifest.file_names import MANIFEST, REPORT
from linexport.manifest.records import FileRecord, Manifest
from linexport.manifest.schema import from_json

MAX_BYTES = 2**26
"""Largest manifest that is read."""


def is_artifact(folder: Path) -> bool:
    """The folder holds a manifest of linexport's."""
    try:
        read(folder)
    except UsageError:
        return False
    return True


def has_manifest(folder: Path) -> bool:
    """Return whether there is a manifest, damaged or not; False for names the system refuses."""
    try:
        return (folder / MANIFEST).exists()
    except OSError:
        return False


def read(folder: Path) -> Manifest:
    """The manifest of an artifact folder.

    Raises:
        UsageError: the folder or its manifest is missing, or this version cannot read it.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is not a folder; expected an artifact made by linexport convert."
            )
        if path.exists() and not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {MANIFEST}; expected an artifact made by linexport convert."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Convert the model again.") from None


def parse(content: bytes, path: Path) -> Manifest:
    """Return the manifest that the content of a file is.

    Raises:
        UsageError: it is not one this version reads.
    """
    try:
        value = json_text.loads(content.decode("utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}. Convert the model again.") from None
    return from_json(value, str(path))


def describe_files(folder: Path) -> dict[str, FileRecord]:
    """Size and digest of every file of an artifact but the manifest and the report, by name."""
    return {
        path.name: file_record(path)
        for path in sorted(folder.iterdir())
        if path.name not in (MANIFEST, REPORT)
    }


def file_record(path: Path) -> FileRecord:
    """Size and digest of a file of the artifact; errors are those of ``digest``."""
    return FileRecord(path.stat().st_size, digest(path))


def digest(path: Path) -> str:
    """SHA-256 of a file of the artifact.

    Raises:
        UsageError: it is missing.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UsageError(f"{path} is missing. Convert the model again.") from None
