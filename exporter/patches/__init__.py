"""Functions of other libraries that are swapped for linexport ops while a model is traced.

One file per patched thing, found by scanning here: a module with ``PATCH``. Other packages declare
theirs as entry points, whose objects are such patches:

    [project.entry-points."linexport.patches"]
    my_library = "my_package.my_library:PATCH"

A patch names the functions it stands in for, as they are called inside a library's modeling files,
and the parameters it expects them to have. It applies to every modeling file a model is made of
that has such a function, whichever family it belongs to.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn

from linexport.errors import UnsupportedModelError
from linexport.system.extensions import find_entry_points, load_entry_point, unusable

__all__ = [
    "Patch",
    "Swap",
    "applied",
    "check_signature",
    "modeling_files",
    "original",
    "patches",
]


log = logging.getLogger(__name__)

GROUP = "linexport.patches"
"""Entry points by which other packages add patches."""

KERNELS = "transformers.integrations.hub_kernels"
"""Where the wrappers are from that call compiled kernels."""


@dataclass(frozen=True)
class Swap:
    """One function to swap.

    Attributes:
        name: in its modeling file; "Class.method" for a method.
        parameters: names of the parameters it must have, in order.
        replacement: called in its place, with the same arguments.
        optional: names of parameters that it has in some families, before ``**kwargs``.
    """

    name: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """Functions that are swapped together.

    Attributes:
        swaps: the functions.
        families: model types of the library that were converted and checked with it.
        tried: versions of the library it was tried with, as "package version".
        ignores_padding: the library's code does not know which tokens are padding. The patch does,
            and is compared with the library on every row without its padding.
    """

    swaps: tuple[Swap, ...]
    families: tuple[str, ...]
    tried: tuple[str, ...]
    ignores_padding: bool = False


@cache
def patches() -> tuple[Patch, ...]:
    """Every patch: ``PATCH`` of the modules of this folder, then those of other packages.

    Raises:
        EnvironmentProblemError: a patch of another package cannot be loaded, or swaps a function
            that another patch swaps.
    """
    found = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        patch = getattr(importlib.import_module(f"{__name__}.{module.name}"), "PATCH", None)
        if isinstance(patch, Patch):
            found.append(patch)
    for point in find_entry_points(GROUP):
        patch = load_entry_point(point, Patch)
        own = {swap.name for swap in patch.swaps}
        taken = own & {swap.name for other in found for swap in other.swaps}
        if taken:
            names = ", ".join(sorted(taken))
            raise unusable(point, f"swaps {names}, which another patch swaps already")
        found.append(patch)
    return tuple(found)


@contextmanager
def applied(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Swap every function of these modules that a patch names; all are restored at the end.

    Raises:
        UnsupportedModelError: such a function has other parameters than its patch expects.
    """
    places = list(_places(modules))
    for (holder, name), _ in places:
        log.info("%s.%s is swapped while the model is traced", holder.__name__, name)
    with _replaced([(*place, swap.replacement) for place, swap in places]):
        yield


def modeling_files(model: nn.Module, known: bool = False) -> list[ModuleType]:
    """Return the Python modules that the classes of a model are defined in.

    Args:
        model: the model.
        known: only those of packages that patches were tried with.
    """
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    packages = {tried.partition(" ")[0] for patch in patches() for tried in patch.tried}
    kept = [name for name in names if not known or name.partition(".")[0] in packages]
    return [sys.modules[name] for name in kept if not name.startswith("torch.")]


def ignore_padding(modules: Iterable[ModuleType]) -> bool:
    """Return whether a patch for these modules is of code that does not know padding."""
    names = {swap.name for patch in patches() if patch.ignores_padding for swap in patch.swaps}
    return any(name.partition(".")[0] in vars(module) for module in modules for name in names)


@contextmanager
def original(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Swap the functions that patches name, and others that call kernels, for plain PyTorch.

    The library wraps them to call compiled kernels where a package with such is installed, which
    fails without a GPU, and to say so where none is.
    """
    modules = list(modules)
    places = [place for place, _ in _places(modules)]
    places += [(m, name) for m in modules for name, x in vars(m).items() if _calls_kernels(x)]
    with _replaced([(*place, inspect.unwrap(getattr(*place))) for place in places]):
        yield


Place = tuple[Any, str]
"""A module or class, and the name of a function in it."""


def _places(modules: Iterable[ModuleType]) -> list[tuple[Place, Swap]]:
    found: list[tuple[Place, Swap]] = []
    for module in modules:
        for patch in patches():
            for swap in patch.swaps:
                owner, _, name = swap.name.rpartition(".")
                holder = getattr(module, owner, None) if owner else module
                function = getattr(holder, name, None)
                if function is not None and _defined_in(function, module):
                    place = f"{module.__name__}.{swap.name}"
                    own = inspect.signature(inspect.unwrap(function)).parameters
                    optional = [name for name in swap.optional if name in own]
                    *first, last = swap.parameters
                    check_signature(place, function, (*first, *optional, last), patch.tried)
                    found.append(((holder, name), swap))
    return found


def _defined_in(function: Any, module: ModuleType) -> bool:
    """Not one that the module imports: it is swapped where it is called from, all the same."""
    return inspect.isfunction(inspect.unwrap(function)) and module.__name__ in sys.modules


def _calls_kernels(value: Any) -> bool:
    """A function of PyTorch in the library's wrapper."""
    wrapped = inspect.isfunction(value) and hasattr(value, "__wrapped__")
    return wrapped and value.__globals__.get("__name__") == KERNELS


def check_signature(
    place: str, function: Any, parameters: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    """A library's function is called as it was in the versions it was tried with.

    Raises:
        UnsupportedModelError: it has other parameters.
    """
    found = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    if found != parameters:
        package, _, version = tried[-1].partition(" ")
        same = importlib.metadata.version(package) == version
        advice = (
            "This family has a form of it that linexport does not convert."
            if same
            else "Install such a version, or a newer linexport."
        )
        raise UnsupportedModelError(
            f"{place} has the parameters ({', '.join(found)}); linexport knows it with "
            f"({', '.join(parameters)}), as in {' and '.join(tried)}. {advice}"
        )


@contextmanager
def _replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    with ExitStack() as restore:
        for holder, name, replacement in replacements:
            restore.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, replacement)
        yield
