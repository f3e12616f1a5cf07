"""Targets, one file each: how linexport ops are lowered, and how the result is opened and run."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from linexport.errors import UsageError
from linexport.targets.base import DTYPES, Build, Converted, Options, Session, Target, unchanged

__all__ = [
    "DEFAULT",
    "DTYPES",
    "Build",
    "Converted",
    "Options",
    "Session",
    "Target",
    "find",
    "targets",
    "unchanged",
]

DEFAULT = "ort"


@cache
def targets() -> dict[str, Target]:
    """Every target by name: each module here that defines ``TARGET``."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        target = getattr(importlib.import_module(f"{__name__}.{module.name}"), "TARGET", None)
        if isinstance(target, Target):
            found[target.name] = target
    return found


def find(name: str) -> Target:
    """The target of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in targets():
        raise UsageError(f"Unknown target {name!r}; expected one of {', '.join(targets())}.")
    return targets()[name]
