"""The decay of a gated recurrence, read from an exponent.

exp(X_t - X_s) with X_t = c t                   decay c at every token      (RetNet)
                    X_t = sum_{u <= t} g_u      decay g                     (gated attention)
                    X_t = sum_{u <= t} d_u A    decay d A                   (Mamba)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from linexport.manifest.rewriting import SOFTMAX_ATTENTION
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.terms import Iota, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import match
from linexport.match.roles.roles import Roles


@dataclass(frozen=True)
class Decay:
    """``coefficient`` times a product of leaves at every position of ``time``.

    Attributes:
        width: the labels of channels, where every channel decays by itself.
        lag: a query meets the decays up to that of so many tokens before it.
    """

    leaves: tuple[Leaf, ...]
    time: Index
    width: Index
    coefficient: float
    lag: int = 0


def read_decay(roles: Roles, heads: Index) -> Decay:
    """The decay of the roles, for keys and values of these heads.

    Raises:
        NotAttentionError: the exponent is of another form.
    """
    term = roles.decay
    assert term is not None
    leaves = tuple(term.of(Leaf))
    others = [f for f in term.factors if not isinstance(f, Leaf)]
    if len(others) != 1:
        raise NotAttentionError("its decay is neither constant nor a cumulative sum")
    source, time = others[0], roles.query_position
    if isinstance(source, PositionOrder):
        # sum_u [u <= t] g_u up to and including t: X_t - X_{t-1} = g_t. Where the newest key is
        # that of a token before, so may the newest decay be.
        known = 0 <= -source.offset <= roles.lag
        if source.row != roles.query_position or not known or not leaves:
            raise NotAttentionError("its decay is a cumulative sum over other positions")
        time = source.column
    # c t grows by c from each position to the next.
    elif not isinstance(source, Iota) or source.index != roles.query_position:
        raise NotAttentionError("its decay depends on something else than positions")
    own = frozenset[Axis]().union(*(f.axes for f in leaves))
    # One decay serves all values of a key head: it may not depend on the width of the value.
    if own - {*roles.batch, *heads, *roles.channels, *time}:
        raise NotAttentionError("its decay depends on labels that keys do not have")
    width = roles.channels if own & set(roles.channels) else ()
    lag = -source.offset if isinstance(source, PositionOrder) else 0
    return Decay(leaves, time, width, term.coefficient, lag)


def without_step(product: Term) -> tuple[Term, bool]:
    """Return a product without exp(-c), of exp(c (t - 1 - s)) under s < t, and whether it had one.

    Where keys fade fast, exp(-c) leaves float32, although its product with decays is 1 at most.
    """
    exps = [f for f in product.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    for order in (o for o in product.of(PositionOrder) if o.offset == -1):
        time = Iota(order.row)
        for decay in (f for f in exps if time in f.inner.terms[0].factors):
            (term,) = decay.inner.terms
            # exp(c (t - 1 - s)) = exp(c t) exp(-c) exp(-c s): the factor exp(-c) is what is looked
            # for.
            step = Term(-term.coefficient, tuple(f for f in term.factors if f != time))
            for own in exps:
                (exponent,) = own.inner.terms
                if exponent.coefficient == step.coefficient and (
                    match(exponent, step, decay.axes | own.axes) is not None
                ):
                    rest = tuple(f for f in product.factors if f is not own)
                    return replace(product, factors=rest), True
    return product, False


def common_exponent(product: Term, query_position: Index, key_position: Index) -> Term | None:
    """Return X where exp(X_t) and exp(-X_s) are factors; None without exps.

    Raises:
        NotAttentionError: exps are factors in another way.
    """
    exps = [f for f in product.of(Nested) if f.kind == "exp"]
    if not exps:
        return None
    # exp of a sum was split into factors where its terms are decays: such a sum is something else.
    if any(len(f.inner.terms) != 1 for f in exps):
        raise NotAttentionError("exp is taken of a sum of several things")
    both = [f for f in exps if f.axes & set(query_position) and f.axes & set(key_position)]
    # exp(q_t . k_s) is not a product of a factor of t and one of s.
    if both:
        raise NotAttentionError(f"exp is taken of query times key, which is {SOFTMAX_ATTENTION}")
    at_row = [f.inner.terms[0] for f in exps if f.axes & set(query_position)]
    at_column = [f.inner.terms[0] for f in exps if f.axes & set(key_position)]
    if len(at_row) == len(at_column) > 1:
        raise NotAttentionError(
            f"its decay is a product of {len(at_row)} tensors, where one is expected, a number for "
            "each head or each channel of its keys: multiply them first, or add their logarithms"
        )
    if len(at_row) != 1 or len(at_column) != 1 or len(exps) != 2:
        raise NotAttentionError("its decay is not one factor for queries and its inverse for keys")
    found = common_multiple((*at_row, *at_column), product, query_position, key_position)
    if found is None:
        raise NotAttentionError("the decays of queries and of keys differ")
    return found


def common_multiple(
    terms: Sequence[Term], product: Term, query_position: Index, key_position: Index
) -> Term | None:
    """Return X where two terms are X_t and -X_s; None of others.

    Positions of as many axes are alike. Those of a pixel are two on one side, its height and width,
    where the other side has the number of the pixel.
    """
    if len(query_position) != len(key_position):
        return None
    at_row = [x for x in terms if x.axes & set(query_position)]
    at_column = [x for x in terms if x.axes & set(key_position)]
    if len(terms) != 2 or len(at_row) != 1 or len(at_column) != 1:
        return None
    # exp(X_t - X_s) is a product of decays between s and t only if both sides have the same X: the
    # key's exponent, with t for s and the other sign, must be the query's.
    moved = (
        at_column[0]
        .scaled(-1.0)
        .rename({s: (t,) for s, t in zip(key_position, query_position, strict=True)})
    )
    shared = frozenset(at_row[0].axes | moved.axes) & frozenset(product.axes)
    if not math.isclose(moved.coefficient, at_row[0].coefficient):
        return None
    for query in (at_row[0], _advanced(at_row[0])):
        if match(query, moved, shared) is not None:
            return at_row[0]
    return None


def _advanced(term: Term) -> Term:
    """Return sum_u [u <= t] g_u for sum_u [u <= t - m] g_u, which is what a query may lack."""
    return replace(
        term,
        factors=tuple(
            replace(f, offset=0) if isinstance(f, PositionOrder) and f.offset < 0 else f
            for f in term.factors
        ),
    )


def plain_exps(product: Term, free: frozenset[Axis]) -> Term:
    """Return a product with exp of one entry of a tensor of keys as a function of that entry.

    Raises:
        NotAttentionError: exp of a number of the query is a factor as well: a maximum, without
            which the exponents of keys leave float32.
    """
    factors = list(product.factors)
    positions = set().union(*(o.axes for o in product.of(PositionOrder)))
    for place, factor in enumerate(factors):
        if not positions or not isinstance(factor, Nested) or factor.kind != "exp":
            continue
        term = factor.inner.terms[0]
        leaf = term.factors[0] if len(factor.inner.terms) == len(term.factors) == 1 else None
        # Such an exp depends on one entry alone, so it is an elementwise function of it.
        if isinstance(leaf, Leaf) and leaf.axes == factor.axes:
            if leaf.axes & positions & free:
                raise NotAttentionError(
                    "its exponents have a number of each query subtracted, as a maximum is: sums "
                    "over keys alone would leave float32 where these do not"
                )
            inside = leaf.function
            if term.coefficient != 1:
                inside = ("Mul", (), inside, ("const", term.coefficient, None))
            factors[place] = replace(leaf, function=("Exp", (), inside))
    return replace(product, factors=tuple(factors))
