"""The kernels themselves: Triton functions, which run on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib
from typing import Any

from linexport.plugins.kernels.launch import Argument, Kernel


def function(kernel: Kernel) -> Any:
    """The Triton function of a kernel."""
    module, _, name = kernel.function.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def parameters(kernel: Kernel) -> dict[str, Argument]:
    """The arguments of a kernel by the name of the parameter that each is passed as."""
    constants = dict(kernel.constants)
    names = [name for name in function(kernel).arg_names if name not in constants]
    return dict(zip(names, kernel.arguments, strict=True))
