"""The kernels themselves: Triton functions, which run on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib
from typing import Any

from linexport.plugins.kernels.launch import Kernel


def function(kernel: Kernel) -> Any:
    """The Triton function of a kernel."""
    module, _, name = kernel.function.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
