"""Modules and functions of ``torch.compile``, and how to run what they were made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

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


WRAPPED = "_torchdynamo_orig_callable"
"""Name, in what ``torch.compile`` makes of a function, of the function."""


def original_of(module: nn.Module) -> nn.Module:
    """Return the module that was given to ``torch.compile``; any other as it is."""
    kind = OPTIMIZED.find() if COMPILER in sys.modules else None
    while kind is not None and isinstance(module, kind):
        module = getattr(module, ORIGINAL)
    return module


def uncompiled(module: nn.Module) -> nn.Module:
    """Return ``original_of`` a module, with all its parts exchanged in place for theirs.

    What ``module.compile()`` or ``module.forward = torch.compile(module.forward)`` set on it or on
    them is taken off: a copy of such a function would run the module that it was made of.
    """
    module = original_of(module)
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            part._modules[name] = None if child is None else original_of(child)
    for part in module.modules():
        if vars(part).get(CALL) is not None:
            setattr(part, CALL, None)
        _take_off_forward(part)
    return module


def _take_off_forward(module: nn.Module) -> None:
    """Have a module run the ``forward`` that it was given before that was compiled."""
    given = vars(module).get("forward")
    if given is None or not hasattr(given, WRAPPED):
        return
    # Methods of torch's own modules are wrapped once more.
    original = given
    while not hasattr(original, "__self__") and hasattr(original, "__wrapped__"):
        original = getattr(original, WRAPPED, original.__wrapped__)
    del module.forward
    # A copy of the module has the function that is bound to the module it is a copy of.
    function = getattr(original, "__func__", None)
    if function is None:
        vars(module)["forward"] = original
    elif function is not type(module).forward:
        vars(module)["forward"] = MethodType(function, module)


@contextmanager
def functions_uncompiled() -> Iterator[None]:
    """Run functions that ``torch.compile`` decorates as they were written."""
    if COMPILER not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
