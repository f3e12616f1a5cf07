"""Functions of other libraries that are swapped for linexport ops while a model is traced.

One file per patched thing, found by scanning here: a module with ``PATCH``. Other packages declare
theirs as entry points, whose objects are such patches:

    [project.entry-points."linexport.patches"]
    my_library = "my_package.my_library:PATCH"

A patch names the functions it stands in for, as they are called inside a library's modeling files.
It applies to every modeling file a model is made of that has such a function, whichever family it
belongs to. A function that a release has under another name is found by its parameters, which
``parameters`` reads by what they mean, and a class by its attributes, see ``places``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

from torch import nn

from linexport.patches.parameters import bind, is_same, signature
from linexport.patches.places import FunctionPlace, by_attributes, holders, named
from linexport.system.extensions import find_entry_points, load_entry_point, unusable
from linexport.system.untyped import LibraryObject, TorchCallable
from linexport.system.versions import TRANSFORMERS, ReleaseWindow

__all__ = [
    "Patch",
    "Swap",
    "applied",
    "are_choices_replaced",
    "choosing_together",
    "missing",
    "modeling_files",
    "original",
    "patches",
]


log = logging.getLogger(__name__)

GROUP = "linexport.patches"
"""Entry points by which other packages add patches."""

KERNELS = "hub_kernels"
"""Last name of the module whose wrappers call compiled kernels."""

CHOOSING: ContextVar[bool] = ContextVar("choosing", default=False)

DISTINCT = 4
"""Parameters that a function has at least which is found by them."""


@dataclass(frozen=True)
class Swap:
    """One function to swap.

    Attributes:
        name: in its modeling file; "Class.method" for a method.
        replacement: called in its place. Its parameters say what it needs of the function's, by
            the names that the newest release has; those with a default may be missing there.
    """

    name: str
    replacement: TorchCallable


@dataclass(frozen=True)
class Patch:
    """Functions that are swapped together.

    Attributes:
        swaps: the functions.
        families: model types of the library that were converted and checked with it.
        tried: releases of the library it was tried with.
        choosing: functions that an original has while its choices are replaced by others, in the
            place of those that choose token by token; called with the library's own first.
    """

    swaps: tuple[Swap, ...]
    families: tuple[str, ...]
    tried: ReleaseWindow = TRANSFORMERS
    choosing: tuple[Swap, ...] = ()


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
def applied(modules: Iterable[ModuleType]) -> Iterator[set[str]]:
    """Swap every function of these modules that a patch names; all are restored at the end.

    Yields:
        What the functions were given that the patches do not know, filled as they are called.
    """
    notes: set[str] = set()
    places = list(_places(modules))
    for place, _ in places:
        log.info("%s is swapped while the model is traced", place)
    bound = [
        (p.holder, p.name, p.stored(bind(str(p), p.function, swap.replacement, patch.tried, notes)))
        for p, (swap, patch) in places
    ]
    with _replaced(bound):
        yield notes


def modeling_files(model: nn.Module, known: bool = False) -> list[ModuleType]:
    """Return the Python modules that the classes of a model are defined in.

    Args:
        model: the model.
        known: only those of packages that patches were tried with.
    """
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    packages = {patch.tried.package for patch in patches()}
    kept = [name for name in names if not known or name.partition(".")[0] in packages]
    return [sys.modules[name] for name in kept if not name.startswith("torch.")]


@contextmanager
def original(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Swap the functions that patches name, and others that call kernels, for plain PyTorch.

    The library wraps them to call compiled kernels where a package with such is installed, which
    fails without a GPU, and to say so where none is.
    """
    modules = list(modules)
    held = [h for m in modules for h in holders(m) if isinstance(h, ModuleType)]
    plain = [(h, name, _plain(x)) for h in dict.fromkeys(held) for name, x in vars(h).items()]
    together = list(_choosing(modules)) if CHOOSING.get() else []
    with _replaced([*(place for place in plain if place[2] is not None), *together]):
        yield


@contextmanager
def choosing_together(together: bool = True) -> Iterator[None]:
    """Let originals choose for all tokens at once, so that choices can be put in their place.

    Args:
        together: False for a part of an original that chooses by itself within.
    """
    token = CHOOSING.set(together)
    try:
        yield
    finally:
        CHOOSING.reset(token)


def are_choices_replaced() -> bool:
    """Return whether originals choose so."""
    return CHOOSING.get()


def _choosing(modules: Iterable[ModuleType]) -> Iterator[tuple[object, str, object]]:
    """Yield functions that choose token by token, and what is called in their place."""
    for module in modules:
        for patch in patches():
            swaps = {swap.name: swap for swap in patch.choosing}
            places = {n: place for n in swaps if (place := named(module, n)) is not None}
            if not places and _family(module) in patch.families:
                places = by_attributes(module, {n: s.replacement for n, s in swaps.items()})
            for name, place in places.items():
                library = inspect.unwrap(place.function)
                together = partial(swaps[name].replacement, library)
                function = bind(str(place), library, together, patch.tried)
                yield place.holder, place.name, place.stored(function)


def _family(module: ModuleType) -> str:
    """Return the folder of a modeling file, which has the name of its family."""
    return module.__name__.rpartition(".")[0].rpartition(".")[2]


Swapped = tuple[Swap, Patch]


def _places(modules: Iterable[ModuleType]) -> Iterator[tuple[FunctionPlace, Swapped]]:
    """Yield every function of these modules that a patch swaps."""
    for module in modules:
        found = _found(module)
        yield from found
        for patch, swaps in _missing(module, found):
            methods = {swap.name: swap for swap in swaps if "." in swap.name}
            places = by_attributes(module, {n: s.replacement for n, s in methods.items()})
            yield from ((place, (methods[name], patch)) for name, place in places.items())


def _found(module: ModuleType) -> list[tuple[FunctionPlace, Swapped]]:
    """Return the functions of a module that have the name or the parameters of a swap."""
    swaps = [(swap, patch) for patch in patches() for swap in patch.swaps]
    by_name = [(place, both) for both in swaps if (place := named(module, both[0].name))]
    return [*by_name, *_renamed(module, swaps, {id(both) for _, both in by_name})]


def _missing(
    module: ModuleType, found: Iterable[tuple[FunctionPlace, Swapped]]
) -> Iterator[tuple[Patch, list[Swap]]]:
    """Yield the patches that were tried with the file's family, and the swaps that it lacks."""
    swaps = [swap for _, (swap, _) in found]
    for patch in patches():
        missing = [swap for swap in patch.swaps if swap not in swaps]
        # Of a patch for several families each has some of the functions.
        has_none = len(patch.families) == 1 or len(missing) == len(patch.swaps)
        if _family(module) in patch.families and missing and has_none:
            yield patch, missing


def missing(modules: Iterable[ModuleType]) -> str:
    """Name the functions that patches of a file's family swap and the file lacks; "" if none."""
    said, advice = [], dict[str, None]()
    for module in modules:
        for patch, swaps in _missing(module, _places([module])):
            names = " or ".join(swap.name for swap in swaps)
            said.append(
                f"{module.__name__} has no {names}, which linexport replaces to trace this model."
            )
            advice[patch.tried.advice()] = None
    return " ".join([*said, *advice])


def _renamed(
    module: ModuleType, swaps: Sequence[Swapped], known: Container[int]
) -> Iterator[tuple[FunctionPlace, Swapped]]:
    """Yield functions of other names that have the parameters of one replacement, and no other's.

    Args:
        module: that has them.
        swaps: with their patches.
        known: those of functions that the module has by their names, by their ids.
    """
    needs = [(both, signature(both[0].replacement)) for both in swaps]
    names = {swap.name for swap, _ in swaps}
    for name, function in list(vars(module).items()):
        if not inspect.isfunction(function) or name in names:
            continue
        own = signature(function)
        if len(own.parameters) < DISTINCT:
            continue
        same = [both for both, other in needs if is_same(own, other)]
        free = [both for both in same if id(both) not in known]
        if free and len({swap.replacement for swap, _ in same}) == 1:
            yield FunctionPlace(module, name, function), free[0]


def _plain(value: LibraryObject) -> Callable[..., object] | None:
    """Return the function of PyTorch in the library's wrapper; None where it has none."""
    found = None
    while inspect.isfunction(value) and hasattr(value, "__wrapped__"):
        calls_kernels = value.__globals__.get("__name__", "").rpartition(".")[2] == KERNELS
        value = value.__wrapped__
        found = value if calls_kernels else found
    return found


@contextmanager
def _replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    with ExitStack() as restore:
        for holder, name, replacement in replacements:
            restore.callback(setattr, holder, name, inspect.getattr_static(holder, name))
            setattr(holder, name, replacement)
        yield
