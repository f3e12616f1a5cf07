"""The running maximum that a stable form subtracts from its exponents.

    sum_s [s <= t] exp(G_t - G_s + i_s - m_t) (q_t . k_s) v_s
    m_t = max_{s <= t} (G_t - G_s + i_s)

as the mLSTM is published, with G the cumulative sum of g. As m_t = max(m_{t-1} + g_t, i_t), this is
gated attention on keys exp(i_s - m_s) k_s with the decays g_t + m_{t-1} - m_t.
"""

from __future__ import annotations

from dataclasses import replace

from linexport.match.errors import NotAttentionError
from linexport.match.forms.terms import Form, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import match
from linexport.match.roles.roles import Roles


def without_maximum(product: Term) -> tuple[Term, bool]:
    """Return a product without exp(-m_t), and whether it has that for the exps that it has."""
    for factor in product.of(Nested):
        largest = subtracted(factor)
        if largest is None:
            continue
        others = [f for f in product.of(Nested) if f is not factor and f.kind == "exp"]
        # exp(-m_t) does not depend on s: it is a factor of the sum. m must be the maximum of just
        # the exponents that are left.
        weights = Term(1.0, (*product.of(PositionOrder), *others))
        if match(largest.inner.terms[0], weights, factor.axes) is not None:
            rest = tuple(f for f in product.factors if f is not factor)
            return Term(product.coefficient, rest), True
    return product, False


def subtracted(factor: Nested) -> Nested | None:
    """Return m of exp(-m); None of anything else."""
    if factor.kind != "exp" or len(factor.inner.terms) != 1:
        return None
    (term,) = factor.inner.terms
    only = term.factors[0] if term.coefficient == -1 and len(term.factors) == 1 else None
    return only if isinstance(only, Nested) and only.kind == "log max" else None


def weights_below(form: Form) -> Form | None:
    """Return what m is the largest of, where a form is exp(-m); None where it is something else."""
    factors = form.terms[0].factors if len(form.terms) == 1 else ()
    if len(factors) != 1 or not isinstance(factors[0], Nested) or form.terms[0].coefficient != 1:
        return None
    largest = subtracted(factors[0])
    return None if largest is None else Form(form.dims, largest.inner.terms)


def exponent_of(roles: Roles) -> Leaf:
    """Return exp(i_s) among keys and values.

    Raises:
        NotAttentionError: i is not one number for each key, or its sum is of another kind.
    """
    inside = {*roles.channels, *roles.widths} if roles.key else {*roles.channels}
    found = [f for f in (*roles.key, *roles.value) if _is_exp(f) and not f.axes & inside]
    if len(found) != 1 or roles.lag or roles.reverse or roles.mask is not None:
        raise NotAttentionError(
            "its exponents have a maximum subtracted, and are not one number for each key that "
            "counts up to its own query"
        )
    return found[0]


def with_features(roles: Roles, features: Leaf) -> Roles:
    """Return roles that have exp(i_s - m_s) in the place of exp(i_s)."""
    old = exponent_of(roles)
    key, value = (
        tuple(features if leaf is old else leaf for leaf in leaves)
        for leaves in (roles.key, roles.value)
    )
    return replace(roles, key=key, value=value)


def _is_exp(leaf: Leaf) -> bool:
    return leaf.function[0] == "Exp"
