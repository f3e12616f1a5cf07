"""The class that a configuration of transformers names: the first of its architectures."""

from __future__ import annotations

import json
from pathlib import Path

from linexport.sources.files import refuse
from linexport.system.json_object import JsonObject

KEY = "architectures"


def check_architectures(path: Path, config: JsonObject) -> None:
    """Check that a configuration names its classes as a list of names, or not at all.

    Raises:
        UnsupportedModelError: it does not.
    """
    found = config.get(KEY)
    names = isinstance(found, list) and all(isinstance(name, str) for name in found)
    if found is not None and not names:
        raise refuse(
            path,
            f"{KEY} is {json.dumps(found)[:80]}; expected a list of class names",
            "take the folder as its author published it",
        )


def named_class(config: JsonObject) -> str | None:
    """Return the class that a checked configuration names; None where it names none."""
    named: list[str] = config.get(KEY) or []
    return named[0] if named else None
