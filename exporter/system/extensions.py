"""Extensions that other installed packages declare as entry points.

    [project.entry-points."linexport.ops"]
    swish_norm = "my_package.swish_norm:OP"

A registry scans its own folder first, then reads its group here; both give the same kind of object.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from linexport.errors import EnvironmentProblemError


def load_entry_points(group: str, kind: type | None = None) -> Iterator[tuple[str, object]]:
    """Yield the name and the object of each entry point of ``group``, sorted by name.

    Args:
        group: name of the group, such as "linexport.ops".
        kind: class each object must be an instance of; None: any object is accepted.

    Raises:
        EnvironmentProblemError: an entry point cannot be imported, or its object is not a ``kind``;
            the message names the entry point and the package that declares it.
    """
    for point in find_entry_points(group):
        yield point.name, load_entry_point(point, kind)


def find_entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of ``group``, sorted by name; none is loaded."""
    return sorted(entry_points(group=group), key=lambda p: (p.name, p.value))


def load_entry_point(point: EntryPoint, kind: type | None = None) -> Any:
    """Return the object of an entry point.

    Raises:
        EnvironmentProblemError: see ``load_entry_points``.
    """
    try:
        found = point.load()
    except Exception as error:  # the code of others: anything may be raised
        reason = f"cannot be loaded ({type(error).__name__}: {error})"
        raise unusable(point, reason) from error
    if kind is not None and not isinstance(found, kind):
        raise unusable(point, f"is a {type(found).__name__}; expected a {kind.__name__}")
    return found


def raised_in(error: BaseException) -> str | None:
    """Return the place in a package that extends linexport where an error was raised, if it was."""
    groups = [group for group in entry_points().groups if group.startswith("linexport.")]
    points = [point for group in groups for point in find_entry_points(group)]
    others = {point.module.partition(".")[0] for point in points}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in others:
            return f"{frame.f_code.co_filename}:{line}"
        if package == "linexport":
            return None
    return None


def unusable(point: EntryPoint, reason: str) -> EnvironmentProblemError:
    """Return the error that names an entry point, its package and why it cannot be used."""
    package = f"package {point.dist.name} {point.dist.version}" if point.dist else "a package"
    return EnvironmentProblemError(
        f"The entry point {point.name!r} = {point.value!r} of group {point.group!r}, declared by "
        f"{package}, {reason}. Update or uninstall that package."
    )
