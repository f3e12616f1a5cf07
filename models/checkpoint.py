"""linexport's checkpoint: a model's name, its config and its weights in one ``.pt`` file.

    {"format": "linexport", "version": 1, "model": name, "config": {...}, "state_dict": {...}}

Nothing but plain containers and tensors, so that ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from linexport.errors import UnsupportedModelError
from linexport.models.registry import ReferenceModel, build

__all__ = ["FORMAT", "VERSION", "build", "load", "save"]

FORMAT = "linexport"
VERSION = 1


def save(
    module: ReferenceModel, path: str | Path, notes: Mapping[str, object] | None = None
) -> None:
    """Write the file whole or not at all: an interrupted save leaves what was there before.

    Args:
        module: to be written.
        path: of the file.
        notes: further entries, of plain data, which ``load`` does not read.
    """
    target = Path(path)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": module.name,
        "config": module.config,
        "state_dict": module.state_dict(),
        **(notes or {}),
    }
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # Given a file, not a path, torch.save does not write the temporary name into the archive.
        with temporary.open("wb") as file:
            torch.save(content, file)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | Path) -> ReferenceModel:
    """The model of a file that ``save`` wrote, in eval mode.

    Raises:
        UnsupportedModelError: torch reads the file, but it is not a linexport checkpoint.
        UsageError: the model or a key of its config is unknown.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    found = (content.get("format"), content.get("version")) if isinstance(content, dict) else None
    if found != (FORMAT, VERSION):
        raise UnsupportedModelError(
            f"{path} is not a linexport checkpoint of version {VERSION}. Write one with "
            "linexport.models.checkpoint.save."
        )
    module = build(content["model"], content["config"])
    module.load_state_dict(content["state_dict"])
    return module.eval()
