"""Guards on inputs, which torch writes into a function and passes to ``exec``.

A guard is a condition on sizes such as ``((L['x'].size()[1] + 3) // 4) != 1``. Accepted: inputs
``L['name']`` with further keys or indices, their size, stride and storage_offset, numbers, plain
strings, arithmetic, comparisons, and the functions of torch's printer.
"""

from __future__ import annotations

import ast
import re

from linexport.errors import UnsupportedModelError
from linexport.sources.pt2.source_strings import label, shorten

# One line and one kind of quote: torch puts the guard between double quotes too.
_CHARACTERS = re.compile(r"[A-Za-z0-9_ ()\[\]+\-*/%.,=<>!'@:]{1,200000}")
_METHODS = {"size", "stride", "storage_offset"}
_FUNCTIONS = {"max", "min", "abs", "int", "float", "bool", "round"}
_MATH = {"floor", "ceil", "sqrt", "trunc", "isnan", "isinf", "inf", "nan"}
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
)  # fmt: skip
_MAX_EXPONENT = 32


def guard(text: str) -> None:
    """Check one guard.

    Raises:
        UnsupportedModelError: it holds anything but the grammar above.
    """
    try:
        if not _CHARACTERS.fullmatch(text):
            raise ValueError
        _check(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError, UnsupportedModelError):
        raise UnsupportedModelError(
            f"it has a guard on its inputs that torch does not write: {shorten(text)}"
        ) from None


def _check(node: ast.expr) -> None:
    for child in _parts(node):
        _check(child)


def _parts(node: ast.expr) -> list[ast.expr]:
    """The operands of an accepted node."""
    if isinstance(node, ast.Constant):
        _constant(node.value)
        return []
    if isinstance(node, ast.Name) and node.id in ("L", "inf"):
        return []
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.BinOp):
        return _operands(node)
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if isinstance(node, ast.Attribute) and _is_math(node):
        return []
    if isinstance(node, ast.Call) and not node.keywords:
        return _arguments(node)
    raise ValueError


def _constant(value: object) -> None:
    if isinstance(value, str):
        label(value)
    elif not isinstance(value, bool | int | float) or abs(value) > 2.0**66:
        raise ValueError


def _operands(node: ast.BinOp) -> list[ast.expr]:
    if isinstance(node.op, ast.Pow):
        exponent = node.right.value if isinstance(node.right, ast.Constant) else None
        if not isinstance(exponent, int) or exponent > _MAX_EXPONENT:
            raise ValueError
        if any(isinstance(inner, ast.Pow) for inner in ast.walk(node.left)):
            raise ValueError
    elif not isinstance(node.op, _OPERATORS):
        raise ValueError
    return [node.left, node.right]


def _is_math(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATH


def _arguments(node: ast.Call) -> list[ast.expr]:
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in _METHODS and not node.args:
        return [function.value]
    named = isinstance(function, ast.Name) and function.id in _FUNCTIONS
    if named or (isinstance(function, ast.Attribute) and _is_math(function)):
        return node.args
    raise ValueError
