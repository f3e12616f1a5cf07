"""Sizes of tensors while a model is traced: symbols, what they are in the example, and guards.

``torch.SymInt`` is public, and what it stands for is not. torch fixes a size that Python asks for
as an integer; while loops are looked for, such questions are answered here, see
``trace.loops.capture``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch

from linexport.system.torch_internals import Internal
from linexport.system.untyped import TorchInternal

SIZE = Internal("torch", "SymInt", "reads the expression that a size stands for")
NODE = Internal(
    "torch.fx.experimental.sym_node", "SymNode", "reads the expression that a size stands for"
)
ENVIRONMENT = Internal(
    "torch.fx.experimental.symbolic_shapes",
    "ShapeEnv",
    "reads the sizes of the example, and the guards on them",
)
AS_INTEGER = Internal(
    "torch",
    "SymInt.__int__",
    "counts the steps of a loop over tokens, which torch would fix",
)
COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
TORCH = str(Path(torch.__file__).parent)

Symbol = Any
"""A symbol or an expression of sympy."""

Size = int | torch.SymInt

Symbolic = torch.SymInt | torch.SymFloat
"""A size, or a quotient of sizes."""


def expression(size: Symbolic) -> TorchInternal:
    """Return what a size is, as an expression of sympy."""
    return _node(size, "expr")


def symbols(size: object) -> set[Symbol]:
    """Return the symbols in a size, or in a quotient of sizes; none in a number."""
    if not isinstance(size, Symbolic) or is_constant(size):
        return set()
    return {*expression(size).free_symbols}


def is_constant(size: Symbolic) -> bool:
    """Return whether a size is a number that torch wraps."""
    return bool(_node(size, "is_constant")())


def hint(size: torch.SymInt) -> int | None:
    """Return a size in the example; None where it is not known."""
    found = _node(size, "hint")
    return None if found is None else int(found)


def fraction(quotient: torch.SymFloat) -> float:
    """Return a quotient of sizes in the example."""
    return float(_node(quotient, "hint"))


def fixed(size: torch.SymInt) -> int:
    """Return a size as an integer, as torch does: it is that number from here on."""
    return int(_node(size, "int_")())


def varies(size: torch.SymInt) -> bool:
    """Return whether a size may be another one than in the example."""
    limits = _environment(size, "bound_sympy")(expression(size))
    return bool(limits.lower != limits.upper)


def may_be_negative(size: Size) -> bool:
    """Return whether a size, or a difference of sizes, may be below zero."""
    if isinstance(size, int):
        return size < 0
    return bool(_environment(size, "bound_sympy")(expression(size)).lower < 0)


def example(size: Symbolic, symbol: Symbol) -> int | None:
    """Return what a symbol is in the example of the trace that a size belongs to."""
    found = _environment(size, "backed_var_to_val").get(symbol)
    return None if found is None else int(found)


def as_size(size: Symbolic, symbol: Symbol, number: int) -> torch.SymInt:
    """Return a symbol of the same trace as a size, which is ``number`` in the example."""
    found: torch.SymInt = _environment(size, "create_symintnode")(symbol, hint=number)
    return found


def other_forms(olds: Iterable[Size], news: Iterable[Size]) -> dict[Symbol, Symbol | int]:
    """Return the forms that sizes have in ``news``, by those that they have in ``olds``."""
    forms = dict[Symbol, Symbol | int]()
    for old, new in zip(olds, news, strict=True):
        if isinstance(old, torch.SymInt) and not expression(old).is_symbol:
            found = expression(new) if isinstance(new, torch.SymInt) else new
            if found != expression(old):
                forms[expression(old)] = found
    return forms


def replaced(size: Size, known: Mapping[Symbol, Symbol | int]) -> Size:
    """Return a size in which expressions are those that they equal; itself where none is.

    Args:
        size: symbolic or not.
        known: numbers, and expressions of sympy, by what they take the place of.
    """
    if not isinstance(size, torch.SymInt):
        return size
    new = expression(size).subs(known)
    if new == expression(size):
        return size
    if new.is_number:
        return int(new)
    made: torch.SymInt = _environment(size, "create_symintnode")(new, hint=hint(size))
    return made


class Guard(NamedTuple):
    """Outcome of a comparison of sizes in a trace.

    Attributes:
        holds: what is so for the sizes of the example, an expression of sympy.
        place: the innermost line that compares them; None where torch does not say.
    """

    holds: Any
    place: FrameSummary | None


def guards(size: torch.SymInt) -> Iterator[Guard]:
    """Yield what torch saw of the sizes of a trace."""
    for guard in _environment(size, "guards"):
        place = getattr(guard.sloc, "framework_loc", None)
        yield Guard(guard.expr, place if isinstance(place, FrameSummary) else None)


@contextmanager
def no_new_guards(sizes: Iterable[torch.SymInt]) -> Iterator[None]:
    """Let torch raise where it would fix a size, or a relation of sizes, that it had left open.

    Args:
        sizes: of one trace.
    """
    first = next(iter(sizes), None)
    with nullcontext() if first is None else _environment(first, "error_on_new_guards")():
        yield


def _node(size: Symbolic, name: str) -> TorchInternal:
    return NODE.of(SIZE.of(size, "node"), name)


def _environment(size: Symbolic, name: str) -> TorchInternal:
    return ENVIRONMENT.of(_node(size, "shape_env"), name)


@contextmanager
def counting_by(count: Callable[[torch.SymInt], int]) -> Iterator[None]:
    """Let a function say what a size is where Python asks for an integer: in ``range``, say.

    Raises:
        EnvironmentProblemError: sizes of this torch do not ask so.
    """
    AS_INTEGER.need()
    saved = torch.SymInt.__index__, torch.SymInt.__int__
    torch.SymInt.__index__ = torch.SymInt.__int__ = count  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymInt.__index__, torch.SymInt.__int__ = saved  # type: ignore[method-assign]


@contextmanager
def comparing_by(known: Callable[[torch.SymInt, int, str], bool]) -> Iterator[None]:
    """Compare sizes with numbers by their hints where a function says so, outside of torch's code.

    Args:
        known: of a size, a number and the file whose code compares them.
    """
    saved = {name: getattr(torch.SymInt, name) for name in COMPARED}

    def comparing(name: str) -> Callable[[torch.SymInt, object], object]:
        def compare(size: torch.SymInt, number: object) -> TorchInternal:
            file = _caller()
            if type(number) is int and not file.startswith(TORCH) and known(size, number, file):
                return getattr(operator, name)(hint(size), number)
            return saved[name](size, number)

        return compare

    for name in COMPARED:
        setattr(torch.SymInt, name, comparing(name))
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(torch.SymInt, name, function)


def _caller() -> str:
    """Return the file of the code that called this one, through other functions of this file."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename
