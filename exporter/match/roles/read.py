"""A normal form read as linear attention: its numerator, its normaliser, and what the op takes.

numerator / (c sum over the same queries and keys + eps)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import onnx_graphsurgeon as gs

from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import size_of
from linexport.match.forms.terms import TURNS, Count, Form, Leaf, Nested, Term
from linexport.match.roles.assign import assign_roles
from linexport.match.roles.decay import plain_exps, without_step
from linexport.match.roles.denominators import (
    Denominator,
    normalised,
    of_keys_alone,
    read_denominator,
)
from linexport.match.roles.fixed_queries import read_fixed_queries, read_turning_queries
from linexport.match.roles.initial_state import with_initial, without_initial
from linexport.match.roles.roles import Roles
from linexport.match.roles.running_maximum import without_maximum
from linexport.match.roles.score_sums import read_score_sum

WIDEST = 512
"""Features of a power of query times key, above which the state is larger than what it saves."""


def read_roles(form: Form, is_weight: Callable[[gs.Tensor], bool]) -> Roles | None:
    """The roles in a form; None where it has nothing of attention.

    Raises:
        NotAttentionError: it is a product of query, key and value, but not linear attention.
    """
    form, fading = without_initial(form)
    if any(f.kind in TURNS for term in form.terms for f in term.of(Nested)):
        turning = None if fading else read_turning_queries(form, is_weight)
        if turning is not None:
            _sensible(turning)
        return turning
    if len(form.terms) > 1:
        return read_score_sum(form, lambda one: read_roles(one, is_weight))
    if not form.terms:
        return None
    quotient = _Quotient.of(form.terms[0], form)
    roles = quotient.assigned(form, is_weight)
    if roles is None or quotient.divisors > 1:
        return None
    if quotient.divisors:
        roles = quotient.normalised(roles)
    _sensible(roles)
    return roles if fading is None else with_initial(roles, fading)


@dataclass(frozen=True)
class _Quotient:
    """A term a x / (b n), with a number a and sizes n.

    Attributes:
        numerator: x, without a running maximum and without a decay of one step.
        denominator: b, without what keys alone are divided by; None where it is no sum over keys.
        divisors: the number of its denominators.
        coefficient: a.
        counts: n.
        stabilized, lags: what was taken out of x, see ``Roles``.
    """

    numerator: Term
    denominator: Denominator | None
    divisors: int
    coefficient: float
    counts: tuple[Count, ...]
    stabilized: bool
    lags: bool

    @classmethod
    def of(cls, term: Term, form: Form) -> _Quotient:
        """Return a term of a form in its parts."""
        # a and n do not depend on positions, so they are moved out of the sum, and the product that
        # is left is the numerator.
        over = [f for f in term.of(Nested) if f.kind == "one over"]
        counts = tuple(term.of(Count))
        product = Term(1.0, tuple(f for f in term.factors if f not in over and f not in counts))
        product, stabilized = without_maximum(product)
        below = read_denominator(over[0]) if len(over) == 1 else None
        if below is not None:
            product, below = of_keys_alone(product, below)
        product, lags = (product, False) if over else without_step(product)
        product = plain_exps(product, form.axes)
        return cls(product, below, len(over), term.coefficient, counts, stabilized, lags)

    def assigned(self, form: Form, is_weight: Callable[[gs.Tensor], bool]) -> Roles | None:
        """Return the roles in the numerator, before it is divided; None where there are none."""
        product = self.numerator
        roles = assign_roles(product, form, partial(_is_normalised, product, self.denominator))
        # A product with a stored tensor is a projection, not a query times a key.
        if roles is not None and any(
            is_weight(f.tensor) for f in (*roles.query, *roles.key, *roles.value)
        ):
            return None
        if roles is None and not self.divisors:
            roles = read_fixed_queries(product, form, is_weight)
        if roles is None:
            return None
        return replace(
            roles,
            post=self.coefficient,
            post_counts=self.counts,
            stabilized=self.stabilized,
            lags=self.lags,
        )

    def normalised(self, roles: Roles) -> Roles:
        """Return the roles of the quotient.

        Raises:
            NotAttentionError: it is divided by something else than a sum of the same weights.
        """
        if self.denominator is None:
            raise NotAttentionError("its denominator is not one sum over keys plus a number")
        found = normalised(roles, self.numerator, self.denominator)
        if found.lag and not found.key:
            raise NotAttentionError("its denominator counts the keys of a shifted triangle")
        return found


def _is_normalised(product: Term, below: Denominator | None, roles: Roles) -> bool:
    """Return whether roles of a numerator are those of its denominator, where there is one."""
    try:
        return below is None or normalised(roles, product, below) is not None
    except NotAttentionError:
        return False


def _sensible(roles: Roles) -> None:
    """Reject what the op cannot compute, and chains of products that are not attention.

    Raises:
        NotAttentionError: the roles are such.
    """
    queries, keys = size_of(roles.query_position), size_of(roles.key_position)
    if roles.causal and queries != keys:
        raise NotAttentionError(
            f"it has {queries} queries and {keys} keys; causal attention has as many of both"
        )
    if any(a.size.known is None for a in (*roles.channels, *roles.widths)):
        raise NotAttentionError("the width of its heads is not fixed")
    features = size_of(roles.channels).known or 0
    if len(roles.query) > 1 and features > WIDEST:
        raise NotAttentionError(
            f"its scores are products whose features are {features} wide; at most {WIDEST} are "
            "worth a state"
        )
    plain = not roles.causal and not roles.normalize and roles.mask is None
    mapped = any(f.function != ("x",) or _is_map(f) for f in (*roles.query, *roles.key))
    if plain and not mapped and not roles.heads(roles.query):
        raise NotAttentionError(
            "a product of three tensors without mask, normaliser, heads or feature map is a chain "
            "of matrices"
        )


def _is_map(leaf: Leaf) -> bool:
    """Return whether the tensor is the output of a feature map, by its operator."""
    producer = leaf.tensor.inputs[0] if leaf.tensor.inputs else None
    return producer is not None and producer.op in ("Softmax", "Relu", "Exp", "Elu", "Softplus")
