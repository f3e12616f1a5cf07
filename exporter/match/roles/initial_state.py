"""Reduce a recurrence with initial state h to one that starts at zero.

    h_t = a_t h_{t-1} + b_t,  h_{-1} = h     is     h_t - h = a_t (h_{t-1} - h) + b_t - (1 - a_t) h

In normal form the initial state is a second term, exp(G_t) h, added to the sum over tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from linexport.match.errors import NotAttentionError
from linexport.match.forms.terms import Form, Iota, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import match
from linexport.match.roles.roles import Roles


def without_initial(form: Form) -> tuple[Form, Term | None]:
    """Return the sum over tokens alone, and what fades from before the first of them."""
    sums = [t for t in form.terms if t.axes - form.axes and t.of(PositionOrder)]
    fading = [t for t in form.terms if t.of(Nested) and t.axes <= form.axes]
    if len(sums) != 1 or len(fading) != 1 or len(form.terms) != 2:
        return form, None
    return replace(form, terms=tuple(sums)), fading[0]


def with_initial(roles: Roles, fading: Term) -> Roles | None:
    """Return the roles of a recurrence that begins with the state that fades; None of others.

    Raises:
        NotAttentionError: it fades otherwise than the sum over tokens does.
    """
    exps = [f for f in fading.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    leaves: list[Leaf] = fading.of(Leaf)
    known = len(exps) + len(leaves) == len(fading.factors)
    # w (sum + exp(G_t) h): what is added to the sum is weighted with it.
    weighted = all(f in leaves for f in roles.weights)
    state = tuple(f for f in leaves if f not in roles.weights)
    # A state before the first token is the same for all queries.
    constant = not any(f.axes & set(roles.query_position) for f in state)
    found = _with_its_newest_key(roles)
    if roles.query or not weighted or found is None or not known or not constant:
        return None
    assert found.decay is not None
    number = fading.coefficient / roles.post
    if not _is_faded(exps, found.decay, roles.lags):
        raise NotAttentionError("its state at the beginning fades by other decays than its sum")
    return replace(found, initial=Term(number, state))


def _with_its_newest_key(roles: Roles) -> Roles | None:
    """Return the roles of a sum whose newest key has met no decay; None of another sum."""
    decay = roles.decay
    if decay is None or roles.lag > 1:
        return None
    since = roles.lag - roles.lags + sum(order.offset for order in decay.of(PositionOrder))
    if since == 0 and roles.post == 1.0:
        return roles
    # exp(-c) exp(c (t - s)) = exp(c (t - 1 - s)), with exp(-c) a number.
    step = since == 1 and len(decay.factors) == 1 and isinstance(decay.factors[0], Iota)
    same = roles.post > 0 and math.isclose(math.log(roles.post), -decay.coefficient)
    return replace(roles, post=1.0, lags=True) if step and same else None


def _is_faded(exps: list[Nested], decay: Term, lags: bool) -> bool:
    """Return whether factors are exp(G_t), or exp(c t) exp(-c) where keys lag by a step."""
    # h_t = exp(G_t) h + sum_s exp(G_t - G_s) b_s: the state at the beginning meets the decays of
    # the sum.
    step = Term(-decay.coefficient, tuple(f for f in decay.factors if not isinstance(f, Iota)))
    expected = [decay, step] if lags else [decay]
    left = list(exps)
    for term in expected:
        found = next((f for f in left if _is_same(f, term)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _is_same(exp: Nested, term: Term) -> bool:
    (exponent,) = exp.inner.terms
    same = math.isclose(exponent.coefficient, term.coefficient)
    return same and match(exponent, term, exp.axes) is not None
