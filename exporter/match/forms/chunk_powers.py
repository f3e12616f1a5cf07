"""Powers of a decay between chunks, in the rates within them.

r ** (16 n)             exp(16 log(r) n)
r ** (15 - s), stored   r ** 15 exp(-log(r) s)

A model stores powers of positions in a chunk, and raises r ** 16 to the number of a chunk: both are
rounded, and equal to powers of r to the digits of float32 alone. There may be an r for each head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.terms import IDENTITY, Factor, Form, Iota, Leaf, Nested, Term

EQUAL = 1e-5
"""Largest relative difference of powers in float32 that are equal."""

LOGARITHM = ("Log", (), IDENTITY)


@dataclass(frozen=True)
class _Exponent:
    """``number * leaf * position`` of an exponential, as numbers of the heads of the leaf.

    Attributes:
        place: the position, () where there is none.
        values: the number times the leaf, or the number alone.
    """

    number: float
    leaves: tuple[Leaf, ...]
    place: Index
    values: np.ndarray

    def at(self, place: Index, times: int = 1) -> Nested:
        """Return the exponential at another position, to a power."""
        term = Term(times * self.number, (*self.leaves, Iota(place)))
        return Nested("exp", Form(tuple((a,) for a in term.axes), (term,)))


def in_rates_of(block: Term, term: Term, chunk: Index) -> Term:
    """Return a term of chunks with its powers as those of the rates in a term within a chunk.

    Only where the numbers in front of them are then that of the block; else the term as it is.
    """
    rates = [e for f in block.factors if (e := _exponent(f)) is not None and e.place]
    heads = {a for rate in rates for leaf in rate.leaves for a in leaf.axes}
    size = size_of(chunk).known
    if not rates or len(heads) > 1 or size is None:
        return term
    number, factors, changed = np.asarray([term.coefficient]), list[Factor](), False
    for factor in term.factors:
        power = _power(factor, rates, heads, size)
        if power is None:
            factors.append(factor)
        else:
            number, changed = number * power[0], True
            factors += power[1]
    if not changed or not np.allclose(number, block.coefficient, rtol=EQUAL, atol=0):
        return term
    return Term(block.coefficient, tuple(factors))


def _power(
    factor: Factor, rates: Sequence[_Exponent], heads: set[Axis], size: int
) -> tuple[np.ndarray, list[Factor]] | None:
    """Return a factor as numbers of heads, times a power of a rate; None of any other."""
    if isinstance(factor, Leaf):
        return _stored(factor, rates, heads)
    exponent = _exponent(factor)
    if exponent is None or any(not leaf.axes <= heads for leaf in exponent.leaves):
        return None
    if not exponent.place:
        # Without a position the factor is a number for each head.
        return np.exp(exponent.values), []
    for rate in rates:
        # exp(n C r) = exp(r)^(n C): over a chunk of C tokens a state fades by C steps.
        if np.allclose(exponent.values, size * rate.values, rtol=EQUAL, atol=0):
            return np.ones(1), [rate.at(exponent.place, size)]
    return None


def _exponent(factor: Factor) -> _Exponent | None:
    """Read exp of stored numbers times a position, or of them alone."""
    if not isinstance(factor, Nested) or factor.kind != "exp" or len(factor.inner.terms) != 1:
        return None
    (term,) = factor.inner.terms
    leaves, places = tuple(term.of(Leaf)), term.of(Iota)
    if len(leaves) + len(places) != len(term.factors) or max(len(leaves), len(places)) > 1:
        return None
    values = np.asarray([term.coefficient])
    for leaf in leaves:
        if not isinstance(leaf.tensor, gs.Constant) or leaf.function not in (IDENTITY, LOGARITHM):
            return None
        numbers = np.asarray(leaf.tensor.values, np.float64).ravel()
        if leaf.function == LOGARITHM and not (numbers > 0).all():
            return None
        values = values * (np.log(numbers) if leaf.function == LOGARITHM else numbers)
    return _Exponent(term.coefficient, leaves, places[0].index if places else (), values)


def _stored(
    leaf: Leaf, rates: Sequence[_Exponent], heads: set[Axis]
) -> tuple[np.ndarray, list[Factor]] | None:
    """Return stored powers as their first numbers, times a power of a rate."""
    axes = [a for index in leaf.dims for a in index]
    place = [a for a in axes if a not in heads]
    if not isinstance(leaf.tensor, gs.Constant) or leaf.function != IDENTITY or len(place) != 1:
        return None
    sizes = [a.size.known or 0 for a in axes]
    value = np.asarray(leaf.tensor.values, np.float64)
    if value.size != math.prod(sizes) or value.size < 2 or not (value > 0).all():
        return None
    last = axes.index(place[0])
    value = np.moveaxis(value.reshape(sizes), last, -1).reshape(-1, sizes[last])
    for rate in rates:
        # v_n = v_0 exp(r n): the first number times a power of the rate.
        grown = np.exp(rate.values[:, None] * np.arange(value.shape[1]))
        if np.allclose(value, value[:, :1] * grown, rtol=EQUAL, atol=0):
            return value[:, 0], [rate.at((place[0],))]
    return None
