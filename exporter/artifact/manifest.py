"""``manifest.json``: what an artifact is, how it was made and what was measured of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from linexport.errors import UsageError

FORMAT = 1
MANIFEST, MODEL, DATA, REPORT = "manifest.json", "model.onnx", "model.onnx.data", "report.html"


def is_artifact(folder: Path) -> bool:
    """The folder holds a manifest of linexport's."""
    try:
        read(folder)
    except UsageError:
        return False
    return True


def read(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact folder.

    Raises:
        UsageError: there is no folder, no manifest, or not one this version reads.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is not a folder; expected an artifact made by linexport convert."
            )
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {MANIFEST}; expected an artifact made by linexport convert."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Convert the model again.") from None
    if not isinstance(manifest, dict) or "linexport" not in manifest or "format" not in manifest:
        raise UsageError(f"{path} is not a linexport manifest.")
    if manifest["format"] != FORMAT:
        raise UsageError(
            f"{path} has format {manifest['format']}; this version of linexport reads {FORMAT}. "
            "Use the version that made it, or convert the model again."
        )
    return manifest


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


def dumps(manifest: dict[str, Any]) -> str:
    """As text: standard JSON, so non-finite numbers are written as null."""
    return json.dumps(_finite(manifest), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return None
    return value
