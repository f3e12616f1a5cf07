"""Powers of a decay between chunks, in the rates within them.

r ** (16 n)             exp(16 log(r) n)
r ** (15 - s), stored   r ** 15 exp(-log(r) s)

A model stores powers of positions in a chunk, and raises r ** 16 to the number of a chunk: both are
rounded, and equal to powers of r to the digits of float32 alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.recognise.axes import Index, size_of
from linexport.recognise.terms import IDENTITY, Factor, Form, Iota, Leaf, Nested, Term

EQUAL = 1e-5
"""Largest relative difference of powers in float32 that are equal."""


def in_rates_of(block: Term, term: Term, chunk: Index) -> Term:
    """Return a term of chunks with its powers as those of the rates in a term within a chunk.

    The coefficient is that of the block where it is equal.
    """
    rates = [e.coefficient for f in block.factors if (e := _exponent(f)) is not None]
    size = size_of(chunk).known
    if not rates or size is None:
        return term
    coefficient, factors = term.coefficient, list[Factor]()
    for factor in term.factors:
        first, written = _power(factor, rates, size)
        coefficient *= first
        factors.append(written)
    if math.isclose(coefficient, block.coefficient, rel_tol=EQUAL):
        coefficient = block.coefficient
    return Term(coefficient, tuple(factors))


def _exponent(factor: Factor) -> Term | None:
    """Return c t of exp(c t) for positions t; None of another factor."""
    if not isinstance(factor, Nested) or factor.kind != "exp" or len(factor.inner.terms) != 1:
        return None
    (term,) = factor.inner.terms
    alone = len(term.factors) == 1 and isinstance(term.factors[0], Iota)
    return term if alone else None


def _power(factor: Factor, rates: Sequence[float], size: int) -> tuple[float, Factor]:
    """Return the same factor as a number times exp(c t), where c is one of the rates."""
    if isinstance(factor, Leaf):
        return _stored(factor, rates)
    exponent = _exponent(factor)
    if exponent is None or not isinstance(factor, Nested):
        return 1.0, factor
    for rate in rates:
        if math.isclose(exponent.coefficient, size * rate, rel_tol=EQUAL):
            exact = replace(exponent, coefficient=size * rate)
            return 1.0, Nested("exp", replace(factor.inner, terms=(exact,)))
    return 1.0, factor


def _stored(leaf: Leaf, rates: Sequence[float]) -> tuple[float, Factor]:
    if not isinstance(leaf.tensor, gs.Constant) or leaf.function != IDENTITY:
        return 1.0, leaf
    value = np.asarray(leaf.tensor.values, np.float64).ravel()
    index = tuple(a for index in leaf.dims for a in index)
    for rate in rates if value.size > 1 and value[0] else ():
        powers = value[0] * np.exp(rate * np.arange(value.size))
        if np.allclose(value, powers, rtol=EQUAL, atol=0):
            dims = tuple((a,) for a in index)
            return float(value[0]), Nested("exp", Form(dims, (Term(rate, (Iota(index),)),)))
    return 1.0, leaf
