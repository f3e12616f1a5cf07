"""Errors of models that need a GPU, in words of the model and not of the libraries below it."""

from __future__ import annotations

import inspect
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from linexport.patches import gpu_kernels
from linexport.sources.files import first_line

NO_DRIVER = "0 active drivers"
"""Part of the message of Triton on a machine without a GPU."""

NO_CUDA = ("not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available")
"""Parts of the messages of PyTorch where code asks for a GPU."""

NOTHING_CALLED = "'NoneType' object is not callable"
"""Message of Python where a library calls what it could not import."""


class GpuFailure(NamedTuple):
    """Reason why a model needs a GPU, and advice."""

    said: str
    advice: str


def gpu_failure(error: Exception) -> GpuFailure | None:
    """Return why a model cannot run without a GPU; None where it fails for another reason."""
    said = first_line(error)
    if NO_DRIVER in said:
        return GpuFailure(
            f"it launches {_kernel(error.__traceback__)}, which needs a GPU and has no form in "
            "PyTorch here",
            "Compute the same in PyTorch, or use a layer that linexport's page on GPU libraries "
            "lists as one that converts.",
        )
    if any(part in said for part in NO_CUDA):
        return GpuFailure(
            "it asks for a GPU, and linexport converts on the CPU",
            "Make tensors on the device of the inputs (x.device), and leave .cuda() out.",
        )
    last = traceback.extract_tb(error.__traceback__)[-1]
    if NOTHING_CALLED in said and gpu_kernels.is_of_library(last.filename):
        return GpuFailure(
            f"{last.name} of {last.filename}:{last.lineno} ({last.line}) calls a function that "
            "its library could not import",
            "Install the package that has it.",
        )
    return None


def _kernel(trace: TracebackType | None) -> str:
    """Return the name of the Triton kernel that a traceback launches."""
    for frame, _ in traceback.walk_tb(trace):
        found: Any = frame.f_locals.get("self")
        if type(found).__module__.partition(".")[0] == "triton":
            while not inspect.isfunction(found) and hasattr(found, "fn"):
                found = found.fn
            if inspect.isfunction(found):
                return f"the Triton kernel {found.__module__}.{found.__name__}"
    return "a Triton kernel"
