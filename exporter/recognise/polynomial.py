"""Attention whose scores pass through a polynomial before they meet the values.

    sum_s [s <= t] p(q_t . k_s) v_s  /  (sum_s [s <= t] p(q_t . k_s) + eps)

Of polynomials a multiple of 1 + c x + (c x)^2 / 2 is a feature map, taylor2, in the form of its
kernel. In normal form a power of the scores is a product with as many queries and keys, so p is a
sum of terms that differ in those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_graphsurgeon as gs

from linexport.models import feature_maps
from linexport.recognise import roles
from linexport.recognise.axes import Axis
from linexport.recognise.exact import LARGEST
from linexport.recognise.feature_maps import Mapped
from linexport.recognise.joining import match
from linexport.recognise.roles import NotAttentionError, Roles
from linexport.recognise.terms import IDENTITY, Factor, Form, Leaf, Nested, Term

KIND = "taylor2"

HIGHEST = 4
"""Power of the scores that is looked for."""

EQUAL = 1e-4
"""Of two coefficients, relative."""

Axes = frozenset[Axis]


def read(form: Form, is_weight: Callable[[gs.Tensor], bool]) -> tuple[Roles, Mapped] | None:
    """The roles and the map in a form; None where it has no polynomial of scores.

    Raises:
        NotAttentionError: it has one that is no feature map.
    """
    if len(form.terms) < 2:
        return None
    overs = [[f for f in t.of(Nested) if f.kind == "one over"] for t in form.terms]
    if any(len(o) > 1 or [f.key() for f in o] != [f.key() for f in overs[0]] for o in overs):
        return None
    terms = [
        Term(t.coefficient, tuple(f for f in t.factors if f not in o))
        for t, o in zip(form.terms, overs, strict=True)
    ]
    found = _linear(form, terms, is_weight)
    if found is None:
        return None
    term, linear = found
    query, key = linear.query[0], linear.key[0]
    rest = tuple(f for f in term.factors if f is not query and f is not key)
    numbers = _coefficients(terms, _powers(rest, linear), form.axes)
    if numbers is None:
        return None
    scale = _scale(numbers, linear)
    linear = replace(linear, post=numbers[0])
    if overs[0]:
        linear = _normalised(linear, rest, numbers, overs[0][0].inner)
    width = linear.channels[0].size.known or 0
    factor = (scale * width**0.5) ** 0.5
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=EQUAL) else factor
    features = feature_maps.find(KIND).feature_count(width)
    return linear, Mapped(KIND, (), {"query": factor, "key": factor}, features, LARGEST)


def _linear(
    form: Form, terms: Sequence[Term], is_weight: Callable[[gs.Tensor], bool]
) -> tuple[Term, Roles] | None:
    """The first power of the scores, which some term has, or a power of it, and its roles."""
    for term in (_first_power(term, form.axes) for term in terms):
        try:
            found = roles.read(replace(form, terms=(term,)), is_weight)
        except NotAttentionError:
            continue
        if found and len(found.query) == len(found.key) == len(found.channels) == 1:
            return term, found
    return None


def _first_power(term: Term, free: Axes) -> Term:
    """With one query and one key, where it has several of each that are the same."""
    alike: dict[Any, list[Leaf]] = {}
    for leaf in term.of(Leaf):
        alike.setdefault((leaf.key(), len(leaf.axes & free)), []).append(leaf)
    repeated = [group for group in alike.values() if len(group) > 1]
    if len(repeated) != 2:
        return term
    first = repeated[0][0]
    other = max(repeated[1], key=lambda leaf: len(leaf.axes & first.axes))
    copies = [f for group in repeated for f in group if f is not first and f is not other]
    kept = tuple(f for f in term.factors if not any(f is copy for copy in copies))
    return Term(term.coefficient, kept)


def _powers(rest: tuple[Factor, ...], linear: Roles) -> list[Term]:
    """What the terms with the powers of the scores are, from 0."""
    found, factors = [Term(1.0, rest)], rest
    for _ in range(HIGHEST):
        fresh = {axis: (Axis(axis.size),) for axis in linear.channels}
        factors = (*factors, linear.query[0].rename(fresh), linear.key[0].rename(fresh))
        found.append(Term(1.0, factors))
    return found


def _coefficients(terms: Sequence[Term], powers: list[Term], free: Axes) -> list[float] | None:
    """Of each power; None where a term is none of them."""
    numbers = [0.0] * len(powers)
    for term in terms:
        fits = (n for n, power in enumerate(powers) if match(power, term, free) is not None)
        place = next(fits, None)
        if place is None:
            return None
        numbers[place] += term.coefficient
    return numbers


def _scale(numbers: list[float], linear: Roles) -> float:
    """c of a (1 + c x + (c x)^2 / 2)."""
    constant, first, second, *higher = numbers
    exact = math.isclose(first * first, 2 * constant * second, rel_tol=EQUAL)
    if any(higher) or not exact or constant == 0 or first / constant < 0:
        powers = (f"{number:g} x^{n}" for n, number in enumerate(numbers) if number)
        raise NotAttentionError(
            f"its scores x pass through {' + '.join(powers)}; of polynomials only multiples of "
            f"1 + c x + (c x)^2 / 2 with c > 0 are a feature map ({KIND})"
        )
    if not linear.causal:
        raise NotAttentionError(
            f"its scores pass through the kernel of {KIND} without a causal mask: only causal "
            "attention is fused in that form"
        )
    leaves: tuple[Leaf, ...] = (*linear.query, *linear.key)
    if any(leaf.function != IDENTITY for leaf in leaves):
        raise NotAttentionError(
            f"its scores pass through the kernel of {KIND}, and its queries or keys through a "
            "feature map before that"
        )
    return first / constant


def _normalised(
    linear: Roles, rest: tuple[Factor, ...], numbers: list[float], inner: Form
) -> Roles:
    """With the denominator: the same polynomial summed over the keys."""
    values = set(map(id, linear.value))
    weights = tuple(f for f in rest if id(f) not in values)
    sums = [t for t in inner.terms if t.factors]
    found = _coefficients(sums, _powers(weights, linear), inner.axes)
    scale = found[0] / numbers[0] if found else 0.0
    if not found or not all(
        math.isclose(d, scale * n, rel_tol=EQUAL) for d, n in zip(found, numbers, strict=True)
    ):
        raise NotAttentionError(
            "its denominator is not the sum over the same queries and keys as its numerator"
        )
    eps = sum(t.coefficient for t in inner.terms if not t.factors)
    return replace(linear, normalize=True, scale=found[0], eps=eps, post=numbers[0] / found[0])
