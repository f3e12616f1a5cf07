"""Attention whose scores pass through a polynomial before they meet the values.

    sum_s [s <= t] p(q_t . k_s) v_s  /  (sum_s [s <= t] p(q_t . k_s) + eps),   p(x) = sum_n a_n x^n

With a_n >= 0, p(q . k) is the kernel of a feature map: ``taylor2`` for a multiple of
1 + c x + (c x)^2 / 2, ``quadratic`` for one of (x + c)^2, ``polynomial`` for all others. In normal
form a power of the scores is a product with as many queries and keys, so p is a sum of terms that
differ in how often those occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, size_of
from linexport.match.forms.exact import LARGEST
from linexport.match.forms.sign_analysis import sign_of
from linexport.match.forms.terms import Count, Factor, Form, Leaf, Nested, Term
from linexport.match.forms.unify import match
from linexport.match.roles.feature_maps import Mapped
from linexport.match.roles.read import read_roles
from linexport.match.roles.roles import Roles
from linexport.models import feature_maps
from linexport.models.feature_maps import polynomial

HIGHEST = 5
"""Power of the scores that is looked for."""

WIDEST = 4096
"""Features of a power above 2 at most: with more, all pairs of 8,192 tokens cost less."""

EQUAL = 1e-4
"""Largest relative difference of coefficients that are equal."""

Axes = frozenset[Axis]


def read_polynomial(
    form: Form, is_weight: Callable[[gs.Tensor], bool]
) -> tuple[Roles, Mapped] | None:
    """Return the roles and the map in a form; None where it has no polynomial of scores.

    Raises:
        NotAttentionError: it has one that is not a feature map.
    """
    if len(form.terms) == 1 and not _repeated(form.terms[0], form.axes):
        return None
    overs = [[f for f in t.of(Nested) if f.kind == "one over"] for t in form.terms]
    if any(len(o) > 1 or [f.key() for f in o] != [f.key() for f in overs[0]] for o in overs):
        return None
    # All terms are over one denominator, so a / c + b / c = (a + b) / c: it is looked at by itself.
    terms = [
        Term(t.coefficient, tuple(f for f in t.factors if f not in o))
        for t, o in zip(form.terms, overs, strict=True)
    ]
    found = _linear(form, terms, is_weight)
    if found is None:
        return None
    term, linear = found
    query, key = linear.query[0], linear.key[0]
    # Every power of the scores meets the same values and masks: what is left of the first power
    # without its query and key is a factor of all of them.
    rest = tuple(f for f in term.factors if f is not query and f is not key)
    numbers = _coefficients(terms, _powers(rest, linear), form.axes)
    if numbers is None:
        return None
    # The degree is that of the highest power there is.
    while not numbers[-1]:
        numbers.pop()
    _check_signs(numbers)
    below = _denominator(linear, rest, numbers, overs[0][0].inner) if overs[0] else None
    return _mapped(numbers, linear, below)


def _linear(
    form: Form, terms: Sequence[Term], is_weight: Callable[[gs.Tensor], bool]
) -> tuple[Term, Roles] | None:
    """The first power of the scores, which some term has, or a power of it, and its roles."""
    for term in (_first_power(term, form.axes) for term in terms):
        try:
            found = read_roles(replace(form, terms=(term,)), is_weight)
        except NotAttentionError:
            continue
        if found and len(found.query) == len(found.key) == len(found.channels) == 1:
            return term, found
    return None


def _repeated(term: Term, free: Axes) -> list[list[Leaf]]:
    """Leaves that occur several times: powers of the scores have as many queries as keys."""
    alike: dict[object, list[Leaf]] = {}
    for leaf in term.of(Leaf):
        alike.setdefault((leaf.key(), len(leaf.axes & free)), []).append(leaf)
    return [group for group in alike.values() if len(group) > 1]


def _first_power(term: Term, free: Axes) -> Term:
    """Return the term with one query and one key, where it has several equal ones of each."""
    repeated = _repeated(term, free)
    if len(repeated) != 2:
        return term
    # x^n has n equal queries and n equal keys: without n - 1 of each it is the first power.
    first = repeated[0][0]
    # Of the keys, the one that is summed over the channels of this query.
    other = max(repeated[1], key=lambda leaf: len(leaf.axes & first.axes))
    copies = [f for group in repeated for f in group if f is not first and f is not other]
    kept = tuple(f for f in term.factors if not any(f is copy for copy in copies))
    return Term(term.coefficient, kept)


def _powers(rest: tuple[Factor, ...], linear: Roles) -> list[Term]:
    """The terms that the powers of the scores are, from 0."""
    found, factors = [Term(1.0, rest)], rest
    for _ in range(HIGHEST):
        # Every power sums over channels of its own: (sum_d q_d k_d)^2 = sum_de q_d k_d q_e k_e.
        fresh = {axis: (Axis(axis.size),) for axis in linear.channels}
        factors = (*factors, linear.query[0].rename(fresh), linear.key[0].rename(fresh))
        found.append(Term(1.0, factors))
    return found


def _coefficients(terms: Sequence[Term], powers: list[Term], free: Axes) -> list[float] | None:
    """a_n of each power; None where a term is none of them."""
    numbers = [0.0] * len(powers)
    for term in terms:
        fits = (n for n, power in enumerate(powers) if match(power, term, free) is not None)
        place = next(fits, None)
        if place is None:
            return None
        numbers[place] += term.coefficient
    return numbers


def _check_signs(numbers: Sequence[float]) -> None:
    """Reject a polynomial that is not a kernel: features are scaled by roots of coefficients.

    Raises:
        NotAttentionError: coefficients have different signs.
    """
    # With negative coefficients -p is the kernel, and the sign a factor of the sum.
    sign = math.copysign(1.0, numbers[-1])
    if any(sign * number < 0 for number in numbers):
        raise NotAttentionError(
            f"its scores x pass through {_text(numbers)}; of polynomials only those whose "
            "coefficients all have one sign are the kernel of a feature map"
        )


def _cancels(numbers: Sequence[float], linear: Roles) -> bool:
    """Return whether a sum of p(x) may be a small sum of large terms.

    Features of degree n have products as large as (|q| |k|)^n, which add up to p(x). Where p is
    never negative, its sum over many keys is of that size, too, and over few the op computes it
    from the scores. Where p changes its sign, it may sum up to nearly nothing.
    """
    # q . k >= 0 for all of them, and with coefficients of one sign p(x) >= 0 for x >= 0.
    if all(sign_of(leaf) == 1 for leaf in (*linear.query, *linear.key)):
        return False
    a = np.polynomial.Polynomial(np.asarray(numbers) * math.copysign(1.0, numbers[-1]))
    # A smallest value of p lies where its derivative is 0; of odd degree it has none.
    roots = [complex(x) for x in a.deriv().roots()]
    turns = [x.real for x in roots if abs(x.imag) <= EQUAL * abs(x)]
    size = np.polynomial.Polynomial(np.abs(numbers))
    odd = len(numbers) % 2 == 0
    return odd or any(float(a(x)) < -EQUAL * float(size(abs(x))) for x in turns)


def _denominator(
    linear: Roles, rest: tuple[Factor, ...], numbers: Sequence[float], inner: Form
) -> tuple[float, float]:
    """Return r and eps of the denominator r sum p(x) + eps."""
    values = set(map(id, linear.value))
    # The denominator is the numerator with a value of one.
    masks = tuple(f for f in rest if id(f) not in values)
    powers, keys = _powers(masks, linear), size_of(linear.key_position)
    if not masks:
        # Over all keys the sum of x^0 is how many there are.
        powers[0] = Term(1.0, (Count(keys),))
    eps = sum(t.coefficient for t in inner.terms if not t.factors)
    found = _coefficients([t for t in inner.terms if t.factors], powers, inner.axes)
    last = len(numbers) - 1
    # r p(x) has r times every coefficient of p.
    ratio = found[last] / numbers[last] if found else 0.0
    if found and not masks and keys.known is not None:
        # How many there are is a number, that eps was added to.
        found[0] = ratio * numbers[0]
        eps -= found[0] * keys.known
        eps = 0.0 if abs(eps) <= EQUAL * abs(found[0] * keys.known) else eps
    expected = [*(ratio * n for n in numbers), *[0.0] * (HIGHEST - last)]
    if not found or not all(
        math.isclose(d, n, rel_tol=EQUAL) for d, n in zip(found, expected, strict=True)
    ):
        raise NotAttentionError(
            "its denominator is not the sum over the same queries and keys as its numerator"
        )
    return ratio, eps


def _mapped(
    numbers: Sequence[float], linear: Roles, below: tuple[float, float] | None
) -> tuple[Roles, Mapped]:
    """The roles around a map, and the map: p(x) = a kappa(scale^2 x)."""
    width = linear.channels[0].size.known or 0
    kind, parameters, unit, factor = _kind(numbers, width)
    shapes = [p.shape for p in parameters]
    features = feature_maps.find_map(kind).feature_count(width, *shapes)
    if len(numbers) > 3 and features > WIDEST:
        raise NotAttentionError(
            f"its scores x pass through {_text(numbers)}, the kernel of {features:,} features for "
            f"heads of width {width}; at most {WIDEST:,} are computed in less time than all pairs "
            "of tokens"
        )
    # p / unit is the map's kernel; the unit multiplies the whole sum.
    linear = replace(linear, post=unit)
    if below is not None:
        ratio, eps = below
        # p / (r p + eps) = (1 / r) (r p) / (r p + eps), with the op's scores r unit kappa.
        linear = replace(linear, normalize=True, scale=ratio * unit, eps=eps, post=1 / ratio)
    scales = {"query": factor, "key": factor}
    cancels = _text(numbers) if _cancels(numbers, linear) else ""
    return linear, Mapped(kind, parameters, scales, features, LARGEST, cancels)


def _kind(numbers: Sequence[float], width: int) -> tuple[str, tuple[np.ndarray, ...], float, float]:
    """The map of p / unit: its kind, parameters, the unit, and a factor of queries and keys."""
    if len(numbers) == 3:
        constant, first, second = numbers
        # c0 (1 + c x + (c x)^2 / 2) has c0, c0 c, c0 c^2 / 2: the square of the second is twice the
        # product of the others.
        if constant and math.isclose(first * first, 2 * constant * second, rel_tol=EQUAL):
            factor = (first / constant * width**0.5) ** 0.5
            factor = 1.0 if math.isclose(factor, 1.0, rel_tol=EQUAL) else factor
            return "taylor2", (), constant, factor
        # a (x + c)^2 = a x^2 + 2 a c x + a c^2: no discriminant.
        if math.isclose(first * first, 4 * constant * second, rel_tol=EQUAL):
            c = first / (2 * second)
            return "quadratic", (np.asarray([c], np.float32),) if c else (), second, 1.0
    unit = max(numbers)  # the last one may be too small to divide by
    parameters = polynomial.parameters(width, [n / unit for n in numbers])
    return "polynomial", parameters, unit, 1.0


def _text(numbers: Sequence[float]) -> str:
    """The polynomial, "1 + 2 x + 0.5 x^2"; 1 is not written before a power."""
    powers = ["", " x", *(f" x^{n}" for n in range(2, len(numbers)))]
    parts = [(f"{a:g}", x) for a, x in zip(numbers, powers, strict=True) if a]
    return " + ".join(x.strip() if x and a == "1" else a + x for a, x in parts)
