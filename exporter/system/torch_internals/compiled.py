"""Modules and functions of ``torch.compile``, and how to run what they were made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from linexport.system.torch_internals import Internal

COMPILER = "torch._dynamo"
"""Module that everything compiled is made by; where it was not imported nothing is compiled."""

OPTIMIZED = Internal(
    COMPILER,
    "OptimizedModule",
    "takes a module out of what torch.compile(module) returns",
    "the module is compiled whenever it is run",
)

ORIGINAL, CALL = "_orig_mod", "_compiled_call_impl"
"""Names of the module inside of an ``OptimizedModule``, and of what ``module.compile()`` sets."""


def original_of(module: nn.Module) -> nn.Module:
    """Return the module that was given to ``torch.compile``; any other as it is."""
    kind = OPTIMIZED.find() if COMPILER in sys.modules else None
    while kind is not None and isinstance(module, kind):
        module = getattr(module, ORIGINAL)
    return module


def uncompiled(module: nn.Module) -> nn.Module:
    """Return ``original_of`` a module, with all its parts exchanged in place for theirs.

    What ``module.compile()`` set on it or on them is taken off.
    """
    module = original_of(module)
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            part._modules[name] = None if child is None else original_of(child)
    for part in module.modules():
        if vars(part).get(CALL) is not None:
            setattr(part, CALL, None)
    return module


@contextmanager
def functions_uncompiled() -> Iterator[None]:
    """Run functions that ``torch.compile`` decorates as they were written."""
    if COMPILER not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
