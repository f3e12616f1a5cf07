"""Reduce a recurrence with initial state h to one that starts at zero.

    h_t = a_t h_{t-1} + b_t,  h_{-1} = h     is     h_t - h = a_t (h_{t-1} - h) + b_t - (1 - a_t) h

In normal form the initial state is a second term, exp(G_t) h, added to the sum over tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from linexport.match.errors import NotAttentionError
from linexport.match.forms.terms import Form, Leaf, Nested, PositionOrder, Term
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
    if roles.query or roles.decay is None or roles.weights or roles.lag or roles.post != 1.0:
        return None
    exps = [f for f in fading.of(Nested) if f.kind == "exp" and len(f.inner.terms) == 1]
    state = tuple(fading.of(Leaf))
    # A state before the first token is the same for all queries.
    constant = not any(f.axes & set(roles.query_position) for f in state)
    if len(exps) != 1 or len(state) + 1 != len(fading.factors) or not constant:
        return None
    (exponent,) = exps[0].inner.terms
    # h_t = exp(G_t) h + sum_s exp(G_t - G_s) b_s: the state at the beginning meets the decays of
    # the sum.
    same = math.isclose(exponent.coefficient, roles.decay.coefficient)
    if not same or match(exponent, roles.decay, exps[0].axes) is None:
        raise NotAttentionError("its state at the beginning fades by other decays than its sum")
    return replace(roles, initial=Term(fading.coefficient, state))
