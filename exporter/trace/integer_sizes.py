"""``int`` of sizes in the code of a model, while it is traced.

    batch = int(windows.shape[0] / (height * width / size / size))     the size of the batch
    half = int(height / 2)                                             height // 2
    side = int(windows.shape[1] ** 0.5)                                a number, that of all windows

Python's ``int`` makes a number of the example of them. Here the name ``int`` of the files that a
model's code is in is a type of which sizes are: ``int`` of a size is the size, and that of a
quotient or a root is a size of an input, the whole part of one, or a number, that it equals at all
sizes tried. As with loops, it is the comparison with the original that shows whether it does at
others.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType

import torch

from linexport.system.torch_internals import sizes
from linexport.system.untyped import TorchInternal

OTHERS = {"torch", "numpy", "linexport", "onnx", "onnxscript", *sys.stdlib_module_names}
"""Packages whose files are left as they are."""

NAME = "int"

LONGEST_STRIDE = 64
"""The largest number that a quotient is taken to be a size by."""

WHOLE = ((5040, 15120, 25200, 35280), (10080, 5040, 30240, 55440))
OTHER = ((5041, 15127, 25211, 35291), (1, 2, 3, 4))
"""Sizes of inputs that quotients are compared at: such as all usual windows divide, and others."""


FOUND: ContextVar[list[torch.SymInt | int] | None] = ContextVar("FOUND", default=None)
"""Sizes that ``int`` was asked for, while a model is traced."""


class _OfSizes(type):
    """The type of what stands in for ``int``: as ``int`` is, for everything but sizes."""

    def __call__(cls, *args: TorchInternal, **kwargs: TorchInternal) -> TorchInternal:
        found, given = None, args[0] if args else 0
        if isinstance(given, torch.SymInt | torch.SymFloat):
            found = given if isinstance(given, torch.SymInt) else _whole(given)
        noted = FOUND.get()
        if found is None or noted is None:
            return builtins.int(*args, **kwargs)
        noted.append(found)
        return found

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.int

    def __hash__(cls) -> builtins.int:
        return hash(builtins.int)


class Integer(builtins.int, metaclass=_OfSizes):
    """Stand-in for ``int`` in the code of a model."""


def _whole(quotient: torch.SymFloat) -> torch.SymInt | int | None:
    """Return the size, or the number, that the whole part of a quotient is; None of others."""
    symbols = sorted(sizes.symbols(quotient), key=str)
    number = builtins.int(sizes.fraction(quotient))
    if all(_value(quotient, symbols, some) == number for some in WHOLE):
        return number
    best = None
    for symbol in symbols:
        example = sizes.example(quotient, symbol) or 0
        for stride in range(1, LONGEST_STRIDE + 1):
            if example // stride != number:
                continue
            names = [symbol, *(s for s in symbols if s != symbol)]
            if not all(_equal(quotient, names, stride, some) for some in WHOLE):
                continue
            size = sizes.as_size(quotient, symbol, example)
            found = size if stride == 1 else size // stride
            if all(_equal(quotient, names, stride, some) for some in OTHER):
                return found
            best = found if best is None else best
    return best


def _equal(
    quotient: torch.SymFloat, names: Sequence[sizes.Symbol], stride: int, tried: Sequence[int]
) -> bool:
    """Return whether a quotient is the first size over a number, for some sizes; whole parts."""
    return _value(quotient, names, tried) == tried[0] // stride


def _value(
    quotient: torch.SymFloat, names: Sequence[sizes.Symbol], tried: Sequence[int]
) -> int | None:
    """Return the whole part of a quotient for some sizes; None where it has none, or has more."""
    known = dict(zip(names, tried, strict=False))
    if len(known) < len(names):
        return None
    value = sizes.expression(quotient).subs(known)
    return builtins.int(float(value)) if value.is_number and value.is_finite else None


@contextmanager
def integer_sizes(model: torch.nn.Module) -> Iterator[list[torch.SymInt | int]]:
    """Let ``int`` of a size be a size in the code of a model, and of functions that it calls.

    Yields:
        The sizes that were asked for.
    """
    changed = [space for space in _namespaces(model) if NAME not in space]
    found: list[torch.SymInt | int] = []
    token = FOUND.set(found)
    for space in changed:
        space[NAME] = Integer
    try:
        yield found
    finally:
        FOUND.reset(token)
        for space in changed:
            del space[NAME]


def _namespaces(model: torch.nn.Module) -> list[dict[str, object]]:
    """Return the global names of the files of a model's classes, and of what these import."""
    kinds = dict.fromkeys(kind for part in model.modules() for kind in type(part).__mro__)
    waiting: list[object] = [value for kind in kinds for value in vars(kind).values()]
    found: dict[int, dict[str, object]] = {}
    while waiting:
        value = waiting.pop()
        if isinstance(value, type) and not _is_others(value.__module__):
            waiting += [x for x in vars(value).values() if isinstance(x, FunctionType)]
        if not isinstance(value, FunctionType):
            continue
        space = value.__globals__
        if id(space) not in found and not _is_others(str(space.get("__name__"))):
            found[id(space)] = space
            waiting += space.values()
    return list(found.values())


def _is_others(module: str) -> bool:
    return module.partition(".")[0] in OTHERS
