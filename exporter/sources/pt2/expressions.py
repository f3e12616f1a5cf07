"""Symbolic sizes, which torch passes to sympy.sympify and so to ``eval``.

torch writes sympy's srepr, for example ``FloorDiv(Symbol('s0', positive=True, integer=True),
Integer(2))``; plain infix (``s0 // 2 + 1``) is read as well. Accepted: numbers, symbols,
arithmetic, comparisons and the functions that torch writes. Exponents are small literals, so that
nothing here can grow a number beyond memory.
"""

from __future__ import annotations

import ast
import functools
import re

from linexport.errors import UnsupportedModelError
from linexport.sources.pt2.source_strings import shorten, symbol

_CHARACTERS = re.compile(r"[A-Za-z0-9_ ()+\-*/%.,=<>!'&|~]{1,20000}")
_TORCH_FUNCTIONS = {
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt",
    "FloorToInt", "CeilDiv", "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator",
    "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat", "Identity",
}  # fmt: skip
_SYMPY_FUNCTIONS = {
    "Add", "Mul", "Max", "Min", "Abs", "Integer", "Rational", "Piecewise", "ExprCondPair", "Tuple",
    "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Equality", "Unequality",
    "StrictLessThan", "StrictGreaterThan", "LessThan", "GreaterThan", "floor", "ceiling", "sqrt",
}  # fmt: skip
_FUNCTIONS = _TORCH_FUNCTIONS | _SYMPY_FUNCTIONS
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"}
_CONSTANTS = {"true", "false", "oo", "True", "False"}
_ASSUMPTIONS = {"positive", "integer", "nonnegative", "real", "negative", "nonzero", "zero"}
_FLOAT = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,3})?")
_MAX_EXPONENT = 32
_MAX_POWER_NESTING = 2
_MAX_INTEGER = 2**66

_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr,
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def expression(text: str) -> None:
    """Check one expression.

    Raises:
        UnsupportedModelError: it holds anything but the grammar above.
    """
    try:
        if not _CHARACTERS.fullmatch(text):
            raise ValueError
        _check(ast.parse(text, mode="eval").body, _MAX_POWER_NESTING)
    except (ValueError, SyntaxError, RecursionError, MemoryError, UnsupportedModelError):
        raise UnsupportedModelError(
            f"it has a symbolic expression that torch does not write: {shorten(text)}"
        ) from None


def _check(node: ast.expr, powers: int) -> None:
    if isinstance(node, ast.Constant):
        _number(node.value)
    elif isinstance(node, ast.Name):
        if node.id not in _CONSTANTS:
            symbol(node.id)
    elif isinstance(node, ast.UnaryOp):
        _check(node.operand, powers)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        _power(node.left, node.right, powers)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        _check(node.left, powers)
        _check(node.right, powers)
    elif isinstance(node, ast.Compare):
        for operand in (node.left, *node.comparators):
            _check(operand, powers)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        _call(node.func.id, node, powers)
    else:
        raise ValueError


def _number(value: object) -> None:
    if isinstance(value, bool | float):
        return
    if not isinstance(value, int) or value > _MAX_INTEGER:
        raise ValueError


def _call(name: str, call: ast.Call, powers: int) -> None:
    if name == "Symbol":
        _symbol(call)
    elif name == "Float":
        _float(call)
    elif call.keywords:
        raise ValueError
    elif name in _POWERS:
        base, exponent = call.args
        _power(base, exponent, powers)
    elif name in _FUNCTIONS:
        for argument in call.args:
            _check(argument, powers)
    else:
        raise ValueError


def _symbol(call: ast.Call) -> None:
    (name,) = call.args
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        raise ValueError
    symbol(name.value)
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg not in _ASSUMPTIONS or not isinstance(value, bool):
            raise ValueError


def _float(call: ast.Call) -> None:
    (digits,) = call.args
    if not (isinstance(digits, ast.Constant) and isinstance(digits.value, str)):
        raise ValueError
    if not _FLOAT.fullmatch(digits.value):
        raise ValueError
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg != "precision" or not isinstance(value, int) or value > 256:
            raise ValueError


def _power(base: ast.expr, exponent: ast.expr, powers: int) -> None:
    if powers == 0:
        raise ValueError
    _check(base, powers - 1)
    _exponent(exponent)


def _exponent(node: ast.expr) -> None:
    """A small literal: 2, -1, Integer(2), Rational(1, 2), Float('0.5', precision=53)."""
    if isinstance(node, ast.UnaryOp):
        _exponent(node.operand)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "Float":
            _float(node)
            _exponent(ast.Constant(float(ast.literal_eval(node.args[0]))))
        elif node.func.id in ("Integer", "Rational") and not node.keywords:
            for argument in node.args:
                _exponent(argument)
        else:
            raise ValueError
    elif not isinstance(node, ast.Constant) or not abs(_real(node.value)) <= _MAX_EXPONENT:
        raise ValueError


def _real(value: object) -> float:
    if isinstance(value, int | float):
        return value
    raise ValueError
