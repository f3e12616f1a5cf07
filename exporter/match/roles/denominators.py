"""Match the denominator of a quotient of sums with its numerator.

    x_t / (c sum over the same queries and keys + eps)

Without queries, what both sums have are keys, and what the numerator alone has are values:

    sum_s [s <= t] exp(G_t - G_s) k_s v_s  /  sum_s [s <= t] exp(G_t - G_s) k_s

is a softmax over earlier tokens where k is exp of a score: Aaren, sLSTM without recurrent weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis
from linexport.match.forms.functions import without_casts
from linexport.match.forms.terms import Count, Factor, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import equal_up_to_names, match
from linexport.match.roles.decay import plain_exps
from linexport.match.roles.roles import Roles
from linexport.match.roles.running_maximum import exponent_of, without_maximum


@dataclass(frozen=True)
class Denominator:
    """``scale * sum / counts + eps``, with the sum as a product without a number.

    Attributes:
        over: the factor of the form, one over it.
        stabilized: its exponents have their running maximum subtracted.
        lowered: both sums had exponents with a number of each query subtracted.
    """

    over: Nested
    sum: Term
    scale: float
    counts: tuple[Count, ...]
    eps: float
    stabilized: bool = False
    lowered: bool = False


def read_denominator(over: Nested) -> Denominator | None:
    """Return what a factor is one over; None where that is not one sum plus a number."""
    eps = sum(t.coefficient for t in over.inner.terms if not t.factors)
    sums = [t for t in over.inner.terms if t.factors]
    if len(sums) != 1:
        return None
    counts = tuple(sums[0].of(Count))
    factors: list[Factor] = [f for f in sums[0].factors if f not in counts]
    product, stabilized = without_maximum(Term(1.0, tuple(factors)))
    return Denominator(over, product, sums[0].coefficient, counts, eps, stabilized)


def of_keys_alone(product: Term, below: Denominator) -> tuple[Term, Denominator]:
    """Return both sums without what each query multiplies both with, and with decays made whole.

        exp(a_s - m_t)     becomes     exp(a_s)              m a maximum, of whatever kind
        exp(a_s - G_s)     becomes     exp(a_s + G_t - G_s)  G a cumulative sum

    A quotient does not change by either, unless a number is added to its denominator.
    """
    if below.eps or not product.of(PositionOrder):
        return product, below
    free = below.over.inner.axes
    upper, lower = list(product.factors), list(below.sum.factors)
    for factor, other in _pairs(product, below.sum, free):
        # sum_s e x_s / sum_s e y_s = sum_s x_s / sum_s y_s for an e that is not summed over.
        if factor.axes <= free and _entry(factor):
            upper.remove(factor)
            lower.remove(other)
    top, bottom = (
        _with_decays(Term(number, tuple(factors)), free)
        for number, factors in ((product.coefficient, upper), (1.0, lower))
    )
    return top, replace(below, sum=bottom, lowered=len(lower) < len(below.sum.factors))


def _pairs(a: Term, b: Term, free: frozenset[Axis]) -> Iterator[tuple[Nested, Nested]]:
    left = [f for f in b.of(Nested) if f.kind == "exp"]
    for factor in (f for f in a.of(Nested) if f.kind == "exp"):
        same = (f for f in left if equal_up_to_names(Term(1.0, (factor,)), Term(1.0, (f,)), free))
        other = next(same, None)
        if other is not None:
            left.remove(other)
            yield factor, other


def _entry(factor: Nested) -> bool:
    """Return whether a factor is exp of one entry of a tensor, as that of a maximum is."""
    factors = [f for t in factor.inner.terms for f in t.factors]
    return len(factors) == 1 and isinstance(factors[0], Leaf) and factors[0].axes <= factor.axes


def _with_decays(term: Term, free: frozenset[Axis]) -> Term:
    """Return a sum of exp(-G_s) times exp(G_t), where it has that of no query."""
    orders = term.of(PositionOrder)
    exps = [f for f in term.of(Nested) if f.kind == "exp" and not _entry(f)]
    if len(orders) != 1 or len(exps) != 1 or len(orders[0].row) != len(orders[0].column):
        return term
    (order,), (decay,) = orders, exps
    there = not decay.axes & set(order.row) and decay.axes & set(order.column)
    if not there or not set(order.row) <= free or len(decay.inner.terms) != 1:
        return term
    # exp(G_t) is the same for all s, so that both sums may be multiplied with it.
    at_query = decay.inner.rename({s: (t,) for s, t in zip(order.column, order.row, strict=True)})
    grown = replace(at_query, terms=(at_query.terms[0].scaled(-1.0),))
    return replace(term, factors=(*term.factors, Nested("exp", grown)))


def normalised(roles: Roles, product: Term, below: Denominator) -> Roles:
    """Return the roles with their denominator, as normaliser, scale and eps.

    Raises:
        NotAttentionError: it is another sum.
    """
    # A size n divides out of numerator and denominator: x / (z / n) = n x / z. Not with an epsilon,
    # as z / n + eps is not (z + eps) / n.
    if below.counts and below.eps:
        raise NotAttentionError("its epsilon is added to a denominator that a length divides")
    term = plain_exps(below.sum, below.over.inner.axes)
    found = next(_shared(roles, product, term, below.over.inner.axes), None)
    if found is None or below.stabilized is not roles.stabilized:
        raise NotAttentionError(
            "its denominator is not the sum over the same queries and keys as its numerator"
        )
    # x / (c z + eps) = (1 / c) (c x) / (c z + eps): the op scales its scores by c in both sums.
    inverse = tuple(replace(c, power=-c.power) for c in below.counts)
    roles = replace(
        found,
        normalize=True,
        scale=below.scale,
        eps=below.eps,
        post=roles.post / below.scale,
        post_counts=_cancelled((*roles.post_counts, *inverse)),
    )
    return replace(roles, stabilized=roles.stabilized or _is_lowered(roles, below))


def _is_lowered(roles: Roles, below: Denominator) -> bool:
    """Return whether exponents of both sums have their running maximum subtracted.

    A common factor exp(-m) of both sums does not change the quotient. With queries it is written
    only where the model does so.

    Raises:
        NotAttentionError: the model does so, and they are not one number for each key.
    """
    if roles.eps or (roles.query and not below.lowered):
        return False
    try:
        exponent_of(roles)
    except NotAttentionError:
        if below.lowered:
            raise
        return False
    return True


def _shared(roles: Roles, product: Term, below: Term, free: frozenset[Axis]) -> Iterator[Roles]:
    """Yield the roles whose queries and keys are all that a denominator has."""
    # The denominator is the numerator with a value of one: every other factor must be there, too.
    # Factors of the query position alone are outside both sums, unless both have them. PyTorch adds
    # up half precision in float32, so that one of the sums may be of casts: to more digits, which
    # are the same numbers, or to fewer, which is rounding and no part of the formula.
    below = _without_casts(below)
    of_queries = [roles, _with_weights(roles, below)]
    for read in of_queries if roles.query else _keyed(roles, len(below.of(Leaf))):
        outside = {*map(id, read.value), *map(id, read.weights)}
        numerator = Term(1.0, tuple(f for f in product.factors if id(f) not in outside))
        if match(_without_casts(numerator), below, free) is not None:
            yield read


def _without_casts(term: Term) -> Term:
    """Return a product of entries without the floating-point types that they are cast to."""
    return replace(term, factors=tuple(map(_without_cast, term.factors)))


def _without_cast(factor: Factor) -> Factor:
    if not isinstance(factor, Leaf) or factor.truth:
        return factor
    return replace(factor, function=without_casts(factor.function))


def _with_weights(roles: Roles, below: Term) -> Roles:
    """Return the roles with the weights that a denominator has too as factors of the query."""
    names = {f.key() for f in below.of(Leaf)}
    inside = tuple(f for f in roles.weights if _without_cast(f).key() in names)
    outside = tuple(f for f in roles.weights if f not in inside)
    return replace(roles, query=(*roles.query, *inside), weights=outside)


def _keyed(roles: Roles, count: int) -> Iterator[Roles]:
    """Yield the roles of a recurrence with so many of its values as keys."""
    for key in combinations(roles.value, count):
        value = tuple(f for f in roles.value if not any(f is k for k in key))
        own = set().union(*(f.axes for f in key))
        widths = tuple(a for a in roles.widths if a not in own)
        if value:
            yield replace(roles, key=key, value=value, widths=widths)


def _cancelled(counts: tuple[Count, ...]) -> tuple[Count, ...]:
    # n (1 / n) = 1.
    left: list[Count] = []
    for count in counts:
        opposite = replace(count, power=-count.power)
        if opposite in left:
            left.remove(opposite)
        else:
            left.append(count)
    return tuple(left)
