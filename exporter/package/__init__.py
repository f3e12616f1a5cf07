"""An artifact in the form that another system takes: one destination a file, found by scanning.

    artifact -> check -> what the destination needs -> a folder, in one step

A module of this folder that defines ``DESTINATION`` is a destination.
"""

from __future__ import annotations

import importlib
import pkgutil

from linexport.errors import UsageError
from linexport.package.destination import Destination
from linexport.package.folder import package

__all__ = ["Destination", "destinations", "find_destination", "package"]


def destinations() -> dict[str, Destination]:
    """Return every destination by the name users choose it by."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        one = getattr(importlib.import_module(f"{__name__}.{module.name}"), "DESTINATION", None)
        if isinstance(one, Destination):
            found[one.name] = one
    return found


def find_destination(name: str) -> Destination:
    """Return a destination.

    Raises:
        UsageError: there is none of that name.
    """
    known = destinations()
    if name not in known:
        raise UsageError(
            f"Unknown destination {name!r}; expected one of {', '.join(sorted(known))}."
        )
    return known[name]
