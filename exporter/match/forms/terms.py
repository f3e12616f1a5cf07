"""The normal form: a tensor as a sum of products over labelled axes.

    X[dims] = sum_terms  coefficient * sum_{axes not in dims} factor * factor * ...

A factor is

    Leaf           an entry of a tensor of the graph, with an elementwise function applied
    PositionOrder  1 where one position is not after another, else 0: triangles, cumulative sums
    Iota           the position along an axis itself
    Count          the size of a dimension
    Nested         exp, cos, sin, log, log of the largest, or one over, of another normal form

A cumulative sum is a sum with a PositionOrder, a mask is a product with one, so every formulation
of causal linear attention is sum_{s,d} [s <= t] q[t,d] k[s,d] v[s,e], whatever the order in which
it multiplies, sums, transposes and reshapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.graph.operators import BOOLEAN
from linexport.match.forms.axes import Axis, Index, Renaming, renamed

Function = tuple[Any, ...]
"""An elementwise function: ("x",), ("const", value, dtype), or (op, attributes, *arguments)."""

Key = tuple[Any, ...]
"""Key that equal factors and terms share: numbers, names and nested keys."""

IDENTITY: Function = ("x",)

TURNS = ("cos", "sin")
"""Kinds of nested factors that only kernels of convolutions have, see ``rules.oscillations``."""

"""Operators that give truth values."""

MAX_TERMS, MAX_FACTORS, MAX_NESTED = 10, 14, 400
"""Larger forms are not attention; they are given up for opaque values. The last counts the factors
of all sums within sums: a step of Sinkhorn's iteration, x / sum(x), has twice those of the last."""


@dataclass(frozen=True)
class Leaf:
    """``function(tensor[dims])``."""

    tensor: gs.Tensor
    dims: tuple[Index, ...]
    function: Function = IDENTITY

    @property
    def axes(self) -> frozenset[Axis]:
        """Labels it depends on."""
        return frozenset(a for index in self.dims for a in index)

    def rename(self, renaming: Renaming) -> Leaf:
        """Return the same with its axes renamed."""
        return replace(self, dims=tuple(renamed(i, renaming) for i in self.dims))

    def key(self) -> Key:
        """Return a key that is equal for factors that are the same up to their labels."""
        return ("leaf", self.tensor.name, self.function, tuple(len(i) for i in self.dims))

    def indices(self) -> tuple[Index, ...]:
        """Return its labels in a fixed order."""
        return self.dims

    @property
    def logarithm(self) -> Leaf:
        """The logarithm of the entry; log(exp(x)) is x."""
        # log is the inverse of exp for every real number.
        if self.function[0] == "Exp":
            return replace(self, function=self.function[2])
        return replace(self, function=("Log", (), self.function))

    @property
    def truth(self) -> Function | None:
        """The function without casts, if it gives truth values."""
        function = self.function
        while function[0] == "Cast":
            function = function[2]
        stored = function == IDENTITY and str(self.tensor.dtype) == "bool"
        return function if stored or function[0] in BOOLEAN else None


@dataclass(frozen=True)
class StepValue(Leaf):
    """An entry of a value in the body of a loop, which no tensor outside may be."""


@dataclass(frozen=True)
class PositionOrder:
    """1 where ``column <= row + offset`` as positions, else 0."""

    row: Index
    column: Index
    offset: int = 0

    @property
    def axes(self) -> frozenset[Axis]:
        """Labels it depends on."""
        return frozenset(self.row + self.column)

    def rename(self, renaming: Renaming) -> PositionOrder:
        """Return the same with its axes renamed."""
        return PositionOrder(
            renamed(self.row, renaming), renamed(self.column, renaming), self.offset
        )

    def key(self) -> Key:
        """Return a key that is equal for factors that are the same up to their labels."""
        return ("order", len(self.row), len(self.column), self.offset)

    def indices(self) -> tuple[Index, ...]:
        """Return its labels in a fixed order."""
        return (self.row, self.column)

    def complement(self) -> PositionOrder:
        """1 where this is 0."""
        # For integers, not s <= t + c is t <= s - c - 1.
        return PositionOrder(self.column, self.row, -self.offset - 1)


@dataclass(frozen=True)
class Iota:
    """The position along an index."""

    index: Index

    @property
    def axes(self) -> frozenset[Axis]:
        """Labels it depends on."""
        return frozenset(self.index)

    def rename(self, renaming: Renaming) -> Iota:
        """Return the same with its axes renamed."""
        return Iota(renamed(self.index, renaming))

    def key(self) -> Key:
        """Return a key that is equal for factors that are the same up to their labels."""
        return ("iota", len(self.index))

    def indices(self) -> tuple[Index, ...]:
        """Return its labels in a fixed order."""
        return (self.index,)


@dataclass(frozen=True)
class Count:
    """A size, or one over it (``power`` -1)."""

    size: Size
    power: int = 1
    axes: frozenset[Axis] = frozenset()

    def rename(self, renaming: Renaming) -> Count:
        """Return the same: a size has no axes."""
        return self

    def key(self) -> Key:
        """Return a key that is equal for factors that are the same up to their labels."""
        return ("count", str(self.size), self.power)

    def indices(self) -> tuple[Index, ...]:
        """Return no labels."""
        return ()


@dataclass(frozen=True)
class Nested:
    """``exp(inner)`` (kind "exp"), ``log(inner)`` ("log") or ``1 / inner`` ("one over").

    Kinds "cos" and "sin" are named alike. Kind "log max" is the logarithm of the largest product,
    in the place of their sum.
    """

    kind: str
    inner: Form

    @property
    def axes(self) -> frozenset[Axis]:
        """Labels it depends on."""
        return frozenset(a for index in self.inner.dims for a in index)

    def rename(self, renaming: Renaming) -> Nested:
        """Return the same with its axes renamed."""
        return Nested(self.kind, self.inner.rename(renaming))

    def key(self) -> Key:
        """Return a key that is equal for factors that are the same up to their labels."""
        return self._key

    @cached_property
    def _key(self) -> tuple[object, ...]:
        # A sum does not depend on the order of its terms.
        return (self.kind, *sorted((t.key() for t in self.inner.terms), key=repr))

    def indices(self) -> tuple[Index, ...]:
        """Return its labels in a fixed order."""
        return self.inner.dims


Factor = Leaf | PositionOrder | Iota | Count | Nested


@dataclass(frozen=True)
class Term:
    """A product; axes of the factors that the form does not have as dims are summed over."""

    coefficient: float
    factors: tuple[Factor, ...] = ()

    @property
    def axes(self) -> frozenset[Axis]:
        """Labels of all factors."""
        return frozenset().union(*(f.axes for f in self.factors))

    def rename(self, renaming: Renaming) -> Term:
        """Return the same with its axes renamed."""
        return Term(self.coefficient, tuple(f.rename(renaming) for f in self.factors))

    def key(self) -> Key:
        """Return a key that is equal for terms the same up to labels and coefficients."""
        return tuple(sorted((f.key() for f in self.factors), key=repr))

    @property
    def nested(self) -> int:
        """Number of its factors, with those of the sums within it."""
        return sum(f.inner.nested if isinstance(f, Nested) else 1 for f in self.factors)

    def scaled(self, by: float) -> Term:
        """Return the term times a number."""
        return Term(self.coefficient * by, self.factors)

    def of(self, kind: type[Any]) -> list[Any]:
        """Factors of one kind."""
        return [f for f in self.factors if isinstance(f, kind)]


@dataclass(frozen=True)
class Form:
    """A tensor in normal form."""

    dims: tuple[Index, ...]
    terms: tuple[Term, ...]

    def rename(self, renaming: Renaming) -> Form:
        """Return the same with its axes renamed."""
        return Form(
            tuple(renamed(i, renaming) for i in self.dims),
            tuple(t.rename(renaming) for t in self.terms),
        )

    def fresh(self) -> Form:
        """Relabel every dim and sum: the labels of a form have no meaning outside it."""
        axes = {a for index in self.dims for a in index}.union(*(t.axes for t in self.terms))
        return self.rename({a: (Axis(a.size),) for a in axes if not a.parameter})

    @property
    def nested(self) -> int:
        """Number of its factors, with those of the sums within it."""
        return sum(t.nested for t in self.terms)

    @property
    def axes(self) -> frozenset[Axis]:
        """Labels of its dims, and parameters."""
        parameters = {a for t in self.terms for a in t.axes if a.parameter}
        return frozenset(a for index in self.dims for a in index) | parameters

    @property
    def scalar(self) -> float | None:
        """The number it is everywhere, if it is one."""
        if not self.terms:
            return 0.0
        if len(self.terms) == 1 and not self.terms[0].factors:
            return self.terms[0].coefficient
        return None

    @property
    def leaf(self) -> Leaf | None:
        """The only factor, if that is a leaf and nothing is summed over."""
        if len(self.terms) != 1 or len(self.terms[0].factors) != 1:
            return None
        only = self.terms[0].factors[0]
        return only if isinstance(only, Leaf) and only.axes <= self.axes else None
