"""A causal sum without queries and keys, which is a first-order recurrence, as roles.

    sum_s [s <= t] exp(G_t - G_s) v_s       is       h_t = exp(g_t) h_{t-1} + v_t

with G the cumulative sum of g: linear attention whose queries and keys are 1. The labels of the
decay are heads, so that every channel with a decay of its own is one. Without a decay it is a
cumulative sum.
"""

from __future__ import annotations

from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.terms import Form, Leaf, Nested, PositionOrder, Term
from linexport.match.roles.decay import common_exponent
from linexport.match.roles.roles import Roles

FLOATING = ("float32", "float16")


def read_recurrence(product: Term, form: Form) -> Roles | None:
    """Return the roles of a sum over earlier positions alone; None where it is something else.

    Raises:
        NotAttentionError: its decay is not that of a recurrence.
    """
    orders, leaves = product.of(PositionOrder), product.of(Leaf)
    exps = [f for f in product.of(Nested) if f.kind == "exp"]
    if len(orders) != 1 or len(leaves) + len(exps) + 1 != len(product.factors):
        return None
    (order,) = orders
    free, bound = form.axes, product.axes - form.axes
    looks_back = set(order.column) == set(bound) and set(order.row) <= free
    looks_ahead = set(order.row) == set(bound) and set(order.column) <= free
    row, column = (order.row, order.column) if looks_back else (order.column, order.row)
    # Along a fixed number of positions there is nothing to stream.
    fixed = all(a.size.known is not None for a in column)
    if not (looks_back or looks_ahead) or fixed or len(row) != len(column):
        return None
    if order.offset > 0:
        return None
    t, s = set(row), set(column)
    value = [f for f in leaves if f.axes & s]
    weights = [f for f in leaves if f not in value]
    sides = not any(f.axes & s for f in weights)
    mixed = any(f.axes & t and f.axes & s for f in (*value, *exps))
    if not value or not sides or mixed or not all(map(_floating, value)):
        return None
    decay = common_exponent(product, row, column)
    if looks_ahead and decay is not None:
        return None
    own = set() if decay is None else set().union(*(f.axes for f in decay.of(Leaf)))
    inside = _ordered(value, s)
    batch = tuple(a for a in inside if a.size.known is None)
    widths = tuple(a for a in inside if a not in own and a not in batch)
    # A head is a channel that decays by itself; it must be one that the value has.
    if not own & free <= t | set(inside):
        return None
    return Roles(
        (),
        (),
        tuple(value),
        tuple(weights),
        None,
        decay,
        row,
        column,
        (),
        widths,
        batch,
        causal=True,
        lag=-order.offset,
        reverse=looks_ahead,
    )


def _floating(leaf: Leaf) -> bool:
    return str(leaf.tensor.dtype) in FLOATING and leaf.truth is None


def _ordered(leaves: list[Leaf], but: set[Axis]) -> Index:
    return tuple(dict.fromkeys(a for f in leaves for i in f.dims for a in i if a not in but))
