"""Discovery of targets: modules of this folder, and entry points ``linexport.targets``.

    \"\"\"Target ``ort``: ONNX Runtime with its native kernels.\"\"\"        the module's first line
    TARGET = Target(name="ort", ...)

Names and summaries are read from that first line without importing the module, so that the help
lists every target at once and a conversion imports the one it is for. An entry point has the name
of its target; the first line of its module is the summary, too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from linexport.errors import UsageError
from linexport.system.extensions import find_entry_points, load_entry_point, unusable

if TYPE_CHECKING:
    from linexport.targets.base import Target

DEFAULT = "ort"
GROUP = "linexport.targets"

_FIRST_LINE = re.compile(r"Target ``([\w.-]+)``: (.+)")

loaded: dict[str, Target] = {}
"""Targets that were imported, by name."""


@dataclass(frozen=True)
class Listing:
    """A target that was not imported yet.

    Attributes:
        name: users choose it by.
        summary: one line of help; empty where the module has none.
        load: imports it.
    """

    name: str
    summary: str
    load: Callable[[], Target]


@cache
def listings(others: bool = True) -> dict[str, Listing]:
    """Return every target by name, linexport's own first; none is imported.

    Args:
        others: list those of other packages, too.

    Raises:
        EnvironmentProblemError: another package adds a target whose name is taken.
    """
    found = {}
    for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        place = f"{__package__}.{module.name}"
        name, summary = _first_line(place)
        if name:
            found[name] = Listing(name, summary, partial(_load_module, place))
    for point in find_entry_points(GROUP) if others else ():
        if point.name in found:
            raise unusable(point, "has the name of a target that is there already")
        _, summary = _first_line(point.module)
        found[point.name] = Listing(point.name, summary, partial(_load_point, point))
    return found


def find_target(name: str) -> Target:
    """Import and return the target of that name.

    Raises:
        UsageError: there is none.
        EnvironmentProblemError: it is of another package and cannot be used.
    """
    if name not in loaded:
        known = listings()
        if name not in known:
            raise UsageError(f"Unknown target {name!r}; expected one of {', '.join(known)}.")
        loaded[name] = known[name].load()
    return loaded[name]


def _first_line(module: str) -> tuple[str, str]:
    """Return name and summary of a target whose module is not imported; empty where unknown."""
    try:
        spec: Any = importlib.util.find_spec(module)
        # Not get_source, which pytest's loader of plugins lacks.
        source = importlib.util.decode_source(spec.loader.get_data(spec.origin))
        text = ast.get_docstring(ast.parse(source)) or ""
    except Exception:  # the code of others: loading it says what is wrong
        return "", ""
    named = _FIRST_LINE.match(text)
    return (named[1], named[2][0].upper() + named[2][1:]) if named else ("", "")


def _load_module(place: str) -> Target:
    target: Target = importlib.import_module(place).TARGET
    return target


def _load_point(point: EntryPoint) -> Target:
    from linexport.targets.base import Target

    target: Target = load_entry_point(point, Target)
    if target.name != point.name:
        raise unusable(point, f"is a target named {target.name!r}; both names must be the same")
    return target
