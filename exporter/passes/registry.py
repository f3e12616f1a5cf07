"""Discovery of passes: modules of this folder with ``PASS``, entry points ``linexport.passes``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from linexport.errors import UsageError
from linexport.passes.contract import Pass
from linexport.system.extensions import find_entry_points, load_entry_point, unusable

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
    for point in find_entry_points(GROUP):
        other = load_entry_point(point, Pass)
        if other.name in found:
            raise unusable(point, f"is a pass named {other.name!r}, and there is one already")
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
