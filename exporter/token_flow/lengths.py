"""Numbers of tokens and of values as polynomials in the sizes of a graph.

    2 * batch * seq + 3

``PAST`` is the number of tokens that earlier calls were fed. What is not a polynomial, such as a
rounded quotient of a number of chunks, is a symbol of its own, named by its text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

PAST = "tokens before"


@dataclass(frozen=True, order=True)
class Symbol:
    """A size of a graph, or an expression of sizes that is not a polynomial.

    Attributes:
        name: of the size, or the text of the expression.
        parts: names of the sizes in it.
    """

    name: str
    parts: frozenset[str] = field(compare=False)


Monomial = tuple[Symbol, ...]
"""Symbols that are multiplied, sorted."""


@dataclass(frozen=True)
class Length:
    """A polynomial with integer coefficients; see ``of`` and ``symbol``."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    @classmethod
    def sum(cls, terms: Iterable[tuple[Monomial, int]]) -> Length:
        """Return the sum of terms, those of one monomial put together."""
        found: dict[Monomial, int] = {}
        for monomial, coefficient in terms:
            found[monomial] = found.get(monomial, 0) + coefficient
        return cls(tuple(sorted((m, c) for m, c in found.items() if c)))

    @cached_property
    def number(self) -> int | None:
        """The number that it is; None where it has a symbol."""
        if not self.terms:
            return 0
        return self.terms[0][1] if self.terms[0][0] == () and len(self.terms) == 1 else None

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The sizes of the graph that it depends on."""
        parts = (symbol.parts for monomial, _ in self.terms for symbol in monomial)
        return frozenset().union(*parts)

    @property
    def is_at_least_zero(self) -> bool:
        """Return whether it is so for all sizes that are not negative."""
        return all(coefficient >= 0 for _, coefficient in self.terms)

    @property
    def least(self) -> int | None:
        """The least that it can be, where sizes are at least 1; None where there is none."""
        least = 0
        for monomial, coefficient in self.terms:
            if monomial and coefficient < 0:
                return None
            plain = all(x.parts == {x.name} and x.name != PAST for x in monomial)
            least += coefficient if plain else 0
        return least

    def __add__(self, other: Length) -> Length:
        return Length.sum((*self.terms, *other.terms))

    def __neg__(self) -> Length:
        return Length(tuple((monomial, -coefficient) for monomial, coefficient in self.terms))

    def __sub__(self, other: Length) -> Length:
        return self + -other

    def __mul__(self, other: Length) -> Length:
        return Length.sum(
            (tuple(sorted((*m, *n))), c * d) for m, c in self.terms for n, d in other.terms
        )

    def divided(self, other: Length) -> Length | None:
        """Return the exact quotient; None where there is none, or the divisor is a sum."""
        if len(other.terms) != 1:
            return ONE if self == other and other.terms else None
        ((divisor, by),) = other.terms
        found = []
        for monomial, coefficient in self.terms:
            left = list(monomial)
            for symbol in divisor:
                if symbol not in left:
                    return None
                left.remove(symbol)
            if coefficient % by:
                return None
            found.append((tuple(left), coefficient // by))
        return Length.sum(found)

    def __floordiv__(self, other: Length) -> Length:
        exact = self.divided(other)
        if exact is not None:
            return exact
        if self.number is not None and other.number:
            return of(self.number // other.number)
        return _opaque(f"({self}//{other})", self, other)

    def __mod__(self, other: Length) -> Length:
        if self.divided(other) is not None:
            return ZERO
        if self.number is not None and other.number:
            return of(self.number % other.number)
        return _opaque(f"({self}%{other})", self, other)

    def __str__(self) -> str:
        parts = [
            "*".join([str(c)] * (c != 1 or not m) + [x.name for x in m]) for m, c in self.terms
        ]
        return "+".join(parts).replace("+-", "-") or "0"


def of(number: int) -> Length:
    """Return a number."""
    return Length((((), int(number)),)) if number else ZERO


def symbol(name: str) -> Length:
    """Return a size of the graph."""
    return Length((((Symbol(name, frozenset({name})),), 1),))


def _opaque(text: str, *parts: Length) -> Length:
    inside = frozenset().union(*(part.symbols for part in parts))
    return Length((((Symbol(text, inside),), 1),))


ZERO = Length()
ONE = of(1)

OPERATORS: dict[type[ast.operator], Callable[[Length, Length], Length]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def parse(size: int | str, known: Mapping[str, Length] = MappingProxyType({})) -> Length:
    """Return the size that a graph states as a number or as text, some names of which are known."""
    if isinstance(size, int):
        return of(size)
    try:
        return known.get(size) or _of_tree(ast.parse(size.strip(), mode="eval").body, known)
    except (SyntaxError, KeyError):
        return symbol(size)


def _of_tree(node: ast.AST, known: Mapping[str, Length]) -> Length:
    match node:
        case ast.Constant(value=int(number)):
            return of(number)
        case ast.Name(id=name):
            return known.get(name) or symbol(name)
        case ast.BinOp(left=left, op=sign, right=right):
            return OPERATORS[type(sign)](_of_tree(left, known), _of_tree(right, known))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_of_tree(operand, known)
        case ast.Call(func=ast.Name(id="Mod" | "PythonMod"), args=[left, right]):
            return _of_tree(left, known) % _of_tree(right, known)
    raise KeyError(node)


def product(lengths: Iterable[Length]) -> Length:
    """Return the product; 1 of none."""
    result = ONE
    for length in lengths:
        result = result * length
    return result
