"""A causal sum without queries and keys, which is a first-order recurrence, as roles.

    sum_s [s <= t] exp(G_t - G_s) v_s       is       h_t = exp(g_t) h_{t-1} + v_t

with G the cumulative sum of g: linear attention whose queries and keys are 1. The labels of the
decay are heads, so that every channel with a decay of its own is one. Without a decay it is a
cumulative sum.
"""

from __future__ import annotations

from linexport.match.forms.terms import Form, Leaf, Nested, PositionOrder, Term
from linexport.match.roles.decay import common_exponent
from linexport.match.roles.labels import Labelled, Positions, axes_of, batch_and_widths
from linexport.match.roles.roles import Roles

FLOATING = ("float32", "float16")


def read_recurrence(product: Term, form: Form) -> Roles | None:
    """Return the roles of a sum over earlier positions alone; None where it is something else.

    Raises:
        NotAttentionError: its decay is not that of a recurrence.
    """
    positions = _positions(product, form)
    if positions is None:
        return None
    found = Labelled.of(product.of(Leaf), positions.query, positions.key, ())
    # exp(G_t - G_s) is two exps; one with both positions is a score.
    mixed = any(f.axes & {*positions.query} and f.axes & {*positions.key} for f in _exps(product))
    if mixed or found.both or not found.s or not all(map(_floating, found.s)):
        return None
    decay = common_exponent(product, positions.query, positions.key)
    if positions.reverse and decay is not None:
        return None
    own = frozenset() if decay is None else axes_of(decay.of(Leaf))
    # A head is a channel that decays by itself; it must be one that the value has.
    if not own & form.axes <= {*positions.query} | (axes_of(found.s) - {*positions.key}):
        return None
    batch, widths = batch_and_widths(found.s, positions.key, own)
    weights = tuple(f for f in product.of(Leaf) if f not in found.s)
    return Roles(
        query=(),
        key=(),
        value=found.s,
        weights=weights,
        mask=None,
        decay=decay,
        query_position=positions.query,
        key_position=positions.key,
        channels=(),
        widths=widths,
        batch=batch,
        causal=True,
        lag=-positions.offset,
        reverse=positions.reverse,
    )


def _positions(product: Term, form: Form) -> Positions | None:
    """Return the positions of a product that sums over those of the key alone."""
    orders, known = product.of(PositionOrder), (*product.of(Leaf), *_exps(product))
    if len(orders) != 1 or len(known) + 1 != len(product.factors):
        return None
    bound = product.axes - form.axes
    found = Positions.of(orders[0], form.axes, bound)
    if found is None or {*found.key} != bound:
        return None
    # Along a fixed number of positions there is nothing to stream.
    fixed = all(a.size.known is not None for a in found.key)
    if fixed or len(found.query) != len(found.key) or found.offset > 0:
        return None
    return found


def _exps(product: Term) -> list[Nested]:
    return [f for f in product.of(Nested) if f.kind == "exp"]


def _floating(leaf: Leaf) -> bool:
    return str(leaf.tensor.dtype) in FLOATING and leaf.truth is None
