"""Sizes of dimensions as monomials, so that ``8 * batch * seq`` can be divided by ``8 * seq``.

    size = coefficient * atom_1 * ... * atom_n

An atom is a symbol of the graph, or the text of an expression that is not a monomial (``(seq+1)``).
Two equal sizes have equal texts; sizes with different texts may still turn out equal.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

MONOMIAL = re.compile(r"[\w.]+(\s*\*\s*[\w.]+)*")

CHUNKS = re.compile(r"\((?P<whole>.+)//(?P<chunk>\d+)\)")
"""A number of chunks."""

PADDED_CHUNKS = re.compile(
    r"\(\(\((\(0-(?P<size>\w+)\)|\((?P<chunk>\d+)-\((?P<rest>\w+)%(?P=chunk)\)\))%(?P<unit>\d+)\)"
    r"\+((?P=size)|(?P=rest))\)//(?P=unit)\)"
)
"""A number of chunks of tokens that were padded to whole chunks: at least one."""


@dataclass(frozen=True)
class Size:
    """A non-negative number known up to the values of its atoms."""

    coefficient: int
    atoms: tuple[str, ...] = ()

    @property
    def known(self) -> int | None:
        """The number, if no atom is left."""
        return None if self.atoms else self.coefficient

    def __str__(self) -> str:
        head = [str(self.coefficient)] if self.coefficient != 1 or not self.atoms else []
        return "*".join([*head, *self.atoms])

    def __mul__(self, other: Size) -> Size:
        return Size(self.coefficient * other.coefficient, tuple(sorted(self.atoms + other.atoms)))

    def __add__(self, other: Size) -> Size:
        return self._sum(other, 1)

    def __sub__(self, other: Size) -> Size:
        return self._sum(other, -1)

    def _sum(self, other: Size, sign: int) -> Size:
        # 2 * seq + 3 * seq = 5 * seq; another sum is not a monomial: its text becomes an atom.
        if self.atoms == other.atoms:
            return Size(self.coefficient + sign * other.coefficient, self.atoms)
        if other == Size(0):
            return self
        if sign < 0:
            return Size(1, (f"({self}-{other})",))
        # Numbers last, as exporters write them.
        first, second = sorted((self, other), key=lambda s: (s.known is not None, str(s)))
        return Size(1, (f"({first}+{second})",))

    def __floordiv__(self, other: Size) -> Size:
        # 8 * seq // 8 = seq for any seq; a quotient with a remainder becomes an atom.
        exact = self.divided(other) or self._of_chunks(other)
        return exact or Size(1, (f"({self}//{other})",))

    def _of_chunks(self, other: Size) -> Size | None:
        """16 * seq // (2 * (seq // 8)) = 64, where seq is of whole chunks.

        Every reshape to chunks needs it to be.
        """
        for atom in other.atoms:
            chunk = CHUNKS.fullmatch(atom)
            around = self.divided(parse(chunk["whole"])) if chunk else None
            rest = other.divided(Size(1, (atom,)))
            if chunk and around and rest:
                return (around * Size(int(chunk["chunk"]))).divided(rest)
        return None

    def __mod__(self, other: Size) -> Size:
        if self.known is not None and other.known:
            return Size(self.known % other.known)
        return Size(1, (f"({self}%{other})",))

    def divided(self, other: Size) -> Size | None:
        """The exact quotient, if it is one."""
        # Each atom of the divisor cancels one of the dividend; so does its coefficient.
        atoms = list(self.atoms)
        for atom in other.atoms:
            if atom not in atoms:
                return None
            atoms.remove(atom)
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        return Size(self.coefficient // other.coefficient, tuple(atoms))


ONE = Size(1)

OPERATORS: dict[type[ast.operator], Callable[[Size, Size], Size]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def parse(size: int | str) -> Size:
    """Return the size that a graph states as a number or as text."""
    if isinstance(size, int):
        return Size(size)
    text = size.strip()
    if not MONOMIAL.fullmatch(text):
        return _computed(text)
    result = ONE
    # Numbers multiply into the coefficient, symbols become atoms; their order does not matter.
    for part in (p.strip() for p in text.split("*")):
        result = result * (Size(int(part)) if part.isdigit() else Size(1, (part,)))
    return result


def _computed(text: str) -> Size:
    """Return the size that an expression gives, or one atom where it is not followed."""
    try:
        return _of_tree(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError):
        return Size(1, (text,))


def _of_tree(node: ast.AST) -> Size:
    match node:
        case ast.Constant(value=int(number)):
            return Size(number)
        case ast.Name(id=name):
            return Size(1, (name,))
        case ast.BinOp(left=left, op=sign, right=right):
            return OPERATORS[type(sign)](_of_tree(left), _of_tree(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Size(0) - _of_tree(operand)
        # As torch writes remainders, and the length of a slice.
        case ast.Call(func=ast.Name(id="Mod" | "PythonMod"), args=[left, right]):
            return _of_tree(left) % _of_tree(right)
        # As torch writes math.ceil(height / 2), and math.floor or int of it.
        case ast.Call(
            func=ast.Name(id=("CeilToInt" | "FloorToInt" | "TruncToInt") as rounded),
            args=[ast.Call(func=ast.Name(id="IntTrueDiv"), args=[left, right])],
        ):
            size, by = _of_tree(left), _of_tree(right)
            if rounded != "CeilToInt":
                return size // by
            return size.divided(by) or (size + (by - ONE)) // by
        case ast.Call(func=ast.Name(id="Min"), args=[ast.Constant(value=1), right]):
            chunks = PADDED_CHUNKS.fullmatch(str(_of_tree(right)))
            if chunks and chunks["chunk"] in (None, chunks["unit"]):
                return ONE
        case ast.Call(func=ast.Name(id="Min"), args=[left, right]):
            size = _of_tree(left)
            if _is_padded(_of_tree(right), size):
                return size
    raise KeyError(node)


def _is_padded(size: Size, own: Size) -> bool:
    """Return whether a size is another one padded to whole chunks."""
    found = PADDED_CHUNKS.fullmatch("*".join(size.atoms))
    if found is None or (found["size"] or found["rest"]) != str(own):
        return False
    return {found["unit"], found["chunk"] or found["unit"]} == {str(size.coefficient)}


def product(sizes: list[Size]) -> Size:
    """Return the product of sizes; 1 of none."""
    result = ONE
    for size in sizes:
        result = result * size
    return result
