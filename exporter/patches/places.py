"""Lookup of the functions that patches swap: by name, or by the attributes that they read.

A class that a release renamed is the one in its modeling file whose methods name every attribute
that the replacement reads of ``self``, and whose method has the parameters that the replacement
needs. Parity compares the model with the library's own code, as with every patch.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from linexport.patches.parameters import binds
from linexport.system.untyped import LibraryObject


@dataclass(frozen=True)
class FunctionPlace:
    """The location of a library's function: an attribute of a module, or of a class.

    Attributes:
        holder: the module or class.
        name: of the attribute.
        function: its value.
    """

    holder: LibraryObject
    name: str
    function: Any

    def __str__(self) -> str:
        owner = self.holder
        if isinstance(owner, type):
            return f"{owner.__module__}.{owner.__qualname__}.{self.name}"
        return f"{owner.__name__}.{self.name}"

    def stored(self, function: Callable[..., object]) -> Any:
        """Return another function as the holder has this one."""
        static = isinstance(inspect.getattr_static(self.holder, self.name), staticmethod)
        return staticmethod(function) if static else function


def named(module: ModuleType, name: str) -> FunctionPlace | None:
    """Return a function by its name: of the module, or of what the module has.

    Args:
        module: a modeling file of a library.
        name: "Class.method" for a method.
    """
    owner, _, name = name.rpartition(".")
    # A release may call a function as that of another of its modules, or as a method.
    for holder in [getattr(module, owner, None)] if owner else holders(module):
        place = _held(holder, name)
        if place is not None:
            return place
    return None


def holders(module: ModuleType) -> list[object]:
    """Return a module with the modules and classes of its package that it has by a name."""
    package = module.__name__.partition(".")[0]
    found: list[object] = [module]
    for value in list(vars(module).values()):
        home = getattr(value, "__module__" if isinstance(value, type) else "__name__", "")
        if isinstance(value, type | ModuleType) and home.partition(".")[0] == package:
            found.append(value)
    return found


def by_attributes(
    module: ModuleType, methods: Mapping[str, Callable[..., object]]
) -> dict[str, FunctionPlace]:
    """Return the locations of methods whose classes have other names.

    Args:
        module: a modeling file of a library.
        methods: replacements by the known names, "Class.method".

    Returns:
        Locations by the known names, without methods that fit no class, or more than one.
    """
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    taken = {name.rpartition(".")[0] for name in methods}
    classes = [x for x in own if isinstance(x, type) and x.__name__ not in taken]
    fitting = {
        name: [c for c in classes if _fits(c, name.rpartition(".")[2], replacement)]
        for name, replacement in methods.items()
    }
    found: dict[str, FunctionPlace] = {}
    # Two layers of a model may read the same attributes, and one of them more: that one has its
    # class first, and the other has the class that is left.
    while alone := next((n for n, fit in fitting.items() if len(fit) == 1), None):
        holder = fitting[alone][0]
        place = _held(holder, alone.rpartition(".")[2])
        assert place is not None
        found[alone] = place
        fitting = {n: [c for c in fit if c is not holder] for n, fit in fitting.items()}
    return found


def _held(holder: object, name: str) -> FunctionPlace | None:
    function = getattr(holder, "__dict__", {}).get(name)
    function = getattr(function, "__func__", function)
    if function is None or not inspect.isfunction(inspect.unwrap(function)):
        return None
    return FunctionPlace(holder, name, function)


def _fits(holder: type, name: str, replacement: Callable[..., object]) -> bool:
    place = _held(holder, name)
    return (
        place is not None
        and binds(place.function, replacement)
        and _attributes(replacement) <= _mentioned(holder)
    )


@cache
def _attributes(replacement: Callable[..., object]) -> frozenset[str]:
    """Return the attributes of ``self`` that a replacement reads."""
    code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(replacement))))
    return frozenset(
        node.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


@cache
def _mentioned(holder: type) -> frozenset[str]:
    """Return the names that the methods of a class and of its bases in the same package use."""
    package = holder.__module__.partition(".")[0]
    bases = [base for base in holder.__mro__ if base.__module__.partition(".")[0] == package]
    functions = [inspect.unwrap(f) for b in bases for f in vars(b).values() if callable(f)]
    codes = [f.__code__ for f in functions if inspect.isfunction(f)]
    return frozenset(name for code in codes for name in code.co_names)
