"""Names of transformers that are not public: looked up where they were, then wherever they went."""

from __future__ import annotations

import importlib
import logging
import sys

from linexport.errors import EnvironmentProblemError
from linexport.patches.places import named
from linexport.system.untyped import LibraryObject
from linexport.system.versions import TRANSFORMERS

log = logging.getLogger(__name__)


def find(home: str, name: str) -> LibraryObject:
    """Return what a module of transformers has by a name, or another of its modules that is loaded.

    Args:
        home: the module in the releases that are tested, such as "integrations.moe".
        name: in that module.

    Raises:
        EnvironmentProblemError: no module has it.
    """
    module = f"{TRANSFORMERS.package}.{home}"
    try:
        found = vars(importlib.import_module(module)).get(name)
    except ImportError:
        found = None
    if found is not None:
        return found
    for other, loaded in list(sys.modules.items()):
        if other.startswith(f"{TRANSFORMERS.package}.") and name in getattr(loaded, "__dict__", {}):
            log.info("%s.%s is in %s now", module, name, other)
            return vars(loaded)[name]
    raise _gone(f"{module}.{name}", f", and no other module of {TRANSFORMERS.package} has it")


def of_file(part: object, name: str) -> LibraryObject:
    """Return a function of the modeling file that has a module's class, wherever the file has it.

    Raises:
        EnvironmentProblemError: the file does not have it.
    """
    file = sys.modules[type(part).__module__]
    place = named(file, name)
    if place is None:
        raise _gone(f"{file.__name__}.{name}")
    return place.function


def attribute(holder: LibraryObject, name: str) -> LibraryObject:
    """Return an attribute of a class of transformers that is not public.

    Raises:
        EnvironmentProblemError: the class does not have it.
    """
    found = getattr(holder, name, None)
    if found is None:
        raise _gone(f"{holder.__module__}.{holder.__qualname__}.{name}")
    return found


def _gone(name: str, more: str = "") -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"{name}, which linexport needs to convert this model{more}, does not exist. "
        f"{TRANSFORMERS.advice()}"
    )
