"""Discovery of passes: modules of this folder with ``PASS``, entry points ``linexport.passes``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.passes.contract import Pass
from linexport.system.extensions import load_entry_points

GROUP = "linexport.passes"


@cache
def all_passes() -> tuple[Pass, ...]:
    """Return every pass, linexport's own first, each part sorted by name.

    Raises:
        EnvironmentProblemError: a pass of another package cannot be loaded, or has a name that is
            taken.
    """
    found: dict[str, Pass] = {}
    folder = importlib.import_module(__package__).__path__
    for module in sorted(pkgutil.iter_modules(folder), key=lambda m: m.name):
        own = getattr(importlib.import_module(f"{__package__}.{module.name}"), "PASS", None)
        if isinstance(own, Pass):
            found[own.name] = own
    for entry, other in load_entry_points(GROUP, Pass):
        if other.name in found:
            raise EnvironmentProblemError(
                f"The entry point {entry!r} of group {GROUP!r} adds a pass named {other.name!r}, "
                "but there is one of that name. Rename or uninstall it."
            )
        found[other.name] = other
    return tuple(found.values())


def find_pass(name: str) -> Pass:
    """Return the pass of that name.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    by_name = {found.name: found for found in all_passes()}
    if name not in by_name:
        raise UsageError(f"Unknown pass {name!r}; expected one of {', '.join(by_name)}.")
    return by_name[name]
