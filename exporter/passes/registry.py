"""Discovery of passes: modules of this folder with ``PASS``, entry points ``linexport.passes``.

Passes of one target alone are in a folder of its name below this one.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from linexport.errors import UsageError
from linexport.graph.contract import TARGET, Pass
from linexport.system.extensions import find_entry_points, load_entry_point, unusable

GROUP = "linexport.passes"


@cache
def all_passes() -> tuple[Pass, ...]:
    """Return every pass, linexport's own first, each part sorted by name.

    Raises:
        EnvironmentProblemError: a pass of another package cannot be loaded, has a name that is
            taken, or the stage of passes that belong to a target.
    """
    found = _in_folder(str(__package__))
    taken = {*found, *(one.name for target in _targets() for one in target_passes(target))}
    for point in find_entry_points(GROUP):
        other = load_entry_point(point, Pass)
        if other.stage == TARGET:
            reason = "has the stage 'target', which only targets of linexport have: call it in the "
            raise unusable(point, f"{reason}`prepare` of your Target")
        if other.name in taken:
            raise unusable(point, f"is a pass named {other.name!r}, and there is one already")
        found[other.name] = other
        taken.add(other.name)
    return tuple(found.values())


@cache
def target_passes(target: str) -> tuple[Pass, ...]:
    """Return the passes of one target: modules of the folder of its name, if there is one."""
    if target not in _targets():
        return ()
    return tuple(_in_folder(f"{__package__}.{target}").values())


@cache
def _targets() -> frozenset[str]:
    """Return the names of the targets that have passes of their own: each is a folder here."""
    folder = importlib.import_module(str(__package__)).__path__
    return frozenset(module.name for module in pkgutil.iter_modules(folder) if module.ispkg)


def _in_folder(package: str) -> dict[str, Pass]:
    """Import the modules of a package; returns their passes by name."""
    found = {}
    folder = importlib.import_module(package).__path__
    for module in sorted(pkgutil.iter_modules(folder), key=lambda m: m.name):
        own = getattr(importlib.import_module(f"{package}.{module.name}"), "PASS", None)
        if isinstance(own, Pass):
            found[own.name] = own
    return found


def find_pass(name: str, target: str | None = None) -> Pass:
    """Return the pass of that name, which may be one of the target's own.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    own = () if target is None else target_passes(target)
    by_name = {found.name: found for found in (*all_passes(), *own)}
    if name not in by_name:
        raise UsageError(f"Unknown pass {name!r}; expected one of {', '.join(by_name)}.")
    return by_name[name]
