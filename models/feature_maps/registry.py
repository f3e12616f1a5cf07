"""All feature maps by kind: those of this folder, which is scanned, and those of other packages.

Other packages declare theirs as entry points, whose objects are such subclasses:

    [project.entry-points."linexport.feature_maps"]
    squareplus = "my_package.squareplus:SquarePlus"
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from linexport.errors import UsageError
from linexport.models.config import parse
from linexport.models.feature_maps.base import MAPS, FeatureMap
from linexport.system.extensions import find_entry_points, load_entry_point, unusable

GROUP = "linexport.feature_maps"
"""Entry points by which other packages add maps."""


def kinds() -> list[str]:
    """Names of all maps, sorted.

    Raises:
        EnvironmentProblemError: a map of another package cannot be loaded, or has a name that is
            taken.
    """
    _load_all()
    return sorted(MAPS)


@cache
def _load_all() -> None:
    """Import every map: defining one registers it."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    for point in find_entry_points(GROUP):
        found = load_entry_point(point, type)
        if not issubclass(found, FeatureMap):
            raise unusable(point, f"is the class {found.__name__}; expected a FeatureMap")


def find_map(kind: str) -> type[FeatureMap]:
    """The map of that name.

    Raises:
        UsageError: there is none; names the nearest.
    """
    known = kinds() if kind not in MAPS else [kind]
    if kind not in known:
        begun = [name for name in known if kind and name.startswith(kind)]
        near = begun or difflib.get_close_matches(kind, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"Unknown feature map {kind!r}; expected one of {', '.join(known)}.{hint}")
    return MAPS[kind]


def make(kind: str, head_dim: int, options: Mapping[str, object] | None = None) -> FeatureMap:
    """The map of that name for heads of width ``head_dim``, with options by name.

    Raises:
        UsageError: no such map, or options it does not have or cannot take.
    """
    found = find_map(kind)
    return found(head_dim, parse(found.Options, options or {}, f"feature map {kind!r}"))
