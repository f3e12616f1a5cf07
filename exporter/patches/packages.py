"""Functions of packages from PyPI that are swapped while a model is traced.

A function is swapped wherever it is held: by a module of Python, by a layer of the model, or in the
closure of a function that a layer has. Those that stand for ops are ``FUNCTIONS`` of the modules of
this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

__all__ = ["Function", "as_ops", "swapped"]


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
    replacement: Callable[..., Any]
    tried: str


@cache
def functions() -> tuple[Function, ...]:
    """Every function that ops stand in for."""
    package = str(__package__)
    folder = pkgutil.iter_modules(importlib.import_module(package).__path__)
    modules = (importlib.import_module(f"{package}.{found.name}") for found in folder)
    return tuple(f for module in modules for f in getattr(module, "FUNCTIONS", ()))


def as_ops(model: nn.Module) -> AbstractContextManager[None]:
    """Swap functions of packages that are imported for linexport's ops."""
    return swapped(functions(), model)


@contextmanager
def swapped(functions: Iterable[Function], model: nn.Module) -> Iterator[None]:
    """Swap those functions whose packages are imported; all are restored at the end."""
    with ExitStack() as restore:
        for function in functions:
            owner, _, name = function.name.rpartition(".")
            holder: Any = sys.modules.get(function.module)
            holder = getattr(holder, owner, None) if owner else holder
            original = getattr(holder, name, None)
            if original is None:
                continue
            for place, key in [(holder, name), *_held(original, model)]:
                restore.callback(setattr, place, key, original)
                setattr(place, key, function.replacement)
        yield


def _held(original: Any, model: nn.Module) -> list[tuple[Any, str]]:
    """Return objects that hold a function, each with the name of the attribute."""
    own = list(model.modules())
    closures = [getattr(x, "__closure__", None) or () for m in own for x in vars(m).values()]
    cells = [cell for closure in closures for cell in closure]
    held = [(c, "cell_contents") for c in cells if c.cell_contents is original]
    for place in [*filter(None, sys.modules.values()), *own]:
        held += [(place, k) for k, x in getattr(place, "__dict__", {}).items() if x is original]
    return held
