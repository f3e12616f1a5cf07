"""Functions of packages from PyPI that are swapped while a model is traced.

A function is swapped wherever it is held: by a module of Python, by a layer of the model, or in the
closure of a function that a layer has. Those that stand for ops are ``FUNCTIONS`` of the modules of
this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from linexport.patches import gpu_kernels
from linexport.system.untyped import LibraryObject, TorchCallable

__all__ = ["Function", "as_ops", "replaced", "swapped"]


@dataclass(frozen=True)
class Function:
    """A function of a package.

    Attributes:
        module: the module that defines it.
        name: in that module; "Class.method" for a method.
        replacement: called in its place, with the same arguments.
        tried: version of the package it was tried with, as "package version".
    """

    module: str
    name: str
    replacement: TorchCallable
    tried: str


@cache
def functions() -> tuple[Function, ...]:
    """Every function that ops stand in for."""
    package = str(__package__)
    folder = pkgutil.iter_modules(importlib.import_module(package).__path__)
    modules = (importlib.import_module(f"{package}.{found.name}") for found in folder)
    return tuple(f for module in modules for f in getattr(module, "FUNCTIONS", ()))


@contextmanager
def as_ops(model: nn.Module) -> Iterator[None]:
    """Swap functions of packages that are imported for linexport's ops."""
    with swapped(functions(), model), gpu_kernels.traced():
        yield


@contextmanager
def swapped(functions: Iterable[Function], model: nn.Module) -> Iterator[None]:
    """Swap those functions whose packages are imported; all are restored at the end."""
    found = {}
    for function in functions:
        holder: LibraryObject = sys.modules.get(function.module)
        for name in function.name.split("."):
            holder = getattr(holder, name, None)
        if holder is not None:
            found[holder] = function.replacement
    with replaced(found, model):
        yield


@contextmanager
def replaced(functions: Mapping[Any, Callable[..., Any]], model: nn.Module) -> Iterator[None]:
    """Put other functions in the place of some, wherever they are held; all are restored."""
    with ExitStack() as restore:
        for original, place, key in _held(functions, model):
            replacement = functions[original]
            before = vars(place).get(key, original) if isinstance(place, type) else original
            static = isinstance(before, staticmethod)
            restore.callback(setattr, place, key, before)
            setattr(place, key, staticmethod(replacement) if static else replacement)
        yield


def _defined(original: Callable[..., object]) -> list[tuple[Any, str]]:
    """Return the module or class that a function is defined in, and its name there."""
    holder: object = sys.modules.get(original.__module__)
    *path, name = original.__qualname__.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    return [(holder, name)] if getattr(holder, name, None) is original else []


def _held(functions: Iterable[Any], model: nn.Module) -> list[tuple[Any, Any, str]]:
    """Return functions with objects that hold them, each with the name of the attribute."""
    wanted = {id(function): function for function in functions}
    held = [(f, place, name) for f in wanted.values() for place, name in _defined(f)]
    if not wanted:
        return held
    own = list(model.modules())
    closures = [getattr(x, "__closure__", None) or () for m in own for x in vars(m).values()]
    cells = [cell for closure in closures for cell in closure]
    found = [(c.cell_contents, c, "cell_contents") for c in cells]
    for place in [*filter(None, sys.modules.values()), *own]:
        names = getattr(place, "__dict__", {})
        found += [(x, place, k) for k, x in names.items() if id(x) in wanted]
    return [*held, *(entry for entry in found if id(entry[0]) in wanted)]
