"""The kernels themselves: Triton functions, which run on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from linexport.plugins.kernels.launch import Argument, Kernel
from linexport.plugins.kernels.plans.parameters import TUPLES


def function(kernel: Kernel) -> Any:
    """The Triton function of a kernel."""
    module, _, name = kernel.function.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def places(kernel: Kernel) -> dict[str, tuple[int, ...]]:
    """Where a function takes each argument and constant: as a parameter, or as an item of one."""
    found: dict[str, tuple[int, ...]] = {}
    for i, name in enumerate(function(kernel).arg_names):
        items = {item: (i, j) for j, item in enumerate(TUPLES.get(name, ()))}
        found |= items or {name: (i,)}
    return found


def parameters(kernel: Kernel) -> dict[str, Argument]:
    """The arguments of a kernel by the name of the parameter, or item of one, that takes each."""
    constants = dict(kernel.constants)
    names = [name for name in places(kernel) if name not in constants]
    return dict(zip(names, kernel.arguments, strict=True))


def in_tuples(kernel: Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by parameter, those of a tuple together, of values by the names of ``places``."""
    found = {}
    for name in function(kernel).arg_names:
        items = TUPLES.get(name)
        found[name] = (
            namedtuple(name, items)._make(values[item] for item in items) if items else values[name]
        )
    return found
