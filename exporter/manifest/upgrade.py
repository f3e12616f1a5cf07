"""JSON of earlier formats as it is now.

files     name -> bytes              becomes  name -> {bytes, sha256}
model_sha256                         becomes  also that of files["model.onnx"]
a missing key of an optional record  becomes  null
refused, in any of them              becomes  rejected
format 2                             becomes  format 3, which has keys that may be missing
"""

from __future__ import annotations

from typing import Any

from linexport.manifest.file_names import MODEL
from linexport.manifest.records import FORMAT

ABSENT: dict[str, Any] = {
    "options": None,
    "precision": "fp32",
    "artifact": "",
    "engines": [],
    "measurement": None,
}
"""Keys that format 1, or early writers of format 2, did not have."""

RENAMED = {"refused": "rejected"}
"""Keys of earlier formats that have another name now."""


def renamed(value: dict[str, Any]) -> dict[str, Any]:
    """Give keys their present names."""
    return {new if (new := RENAMED.get(k, k)) not in value else k: v for k, v in value.items()}


def upgraded(value: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest in the present format; the schema names parts that are damaged."""
    if value["format"] != 1:
        return {**value, "format": FORMAT}
    files = value.get("files")
    if isinstance(files, dict):
        files = {name: {"bytes": size, "sha256": None} for name, size in files.items()}
        if MODEL in files:
            files[MODEL]["sha256"] = value.get("model_sha256")
        for engine in value.get("engines") or []:
            if isinstance(engine, dict) and engine.get("file") in files:
                files[engine["file"]]["sha256"] = engine.get("sha256")
    return {**ABSENT, **value, "files": files, "format": FORMAT}
