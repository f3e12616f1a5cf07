"""A causal convolution with a sum of exponentials, as roles: its queries are stored numbers.

    sum_{s,n} [s <= t] c_n exp(a_n (t - s)) u_s    is    h_t = exp(a) h_{t-1} + u_t,  y_t = c . h_t

linear attention whose query is c at every token, whose keys are 1, and whose channels n decay by
exp(a_n): the diagonal state space of S4D (Gu et al. 2022, arXiv 2206.11893) with real rates, and
MEGA's moving average (Ma et al. 2022, arXiv 2209.10655).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_graphsurgeon as gs

from linexport.recognise.axes import Index
from linexport.recognise.decay import common_exponent
from linexport.recognise.roles import Roles
from linexport.recognise.terms import Form, Leaf, Nested, PositionOrder, Term


def read_fixed_queries(
    product: Term, form: Form, is_weight: Callable[[gs.Tensor], bool]
) -> Roles | None:
    """Return the roles of such a convolution; None where it is something else.

    Raises:
        NotAttentionError: its decay is not that of a recurrence.
    """
    orders, leaves = product.of(PositionOrder), product.of(Leaf)
    exps = [f for f in product.of(Nested) if f.kind == "exp"]
    if len(orders) != 1 or not exps or len(leaves) + len(exps) + 1 != len(product.factors):
        return None
    (order,) = orders
    t, s, free = set(order.row), set(order.column), form.axes
    channels = product.axes - free - s
    looks_back = t <= free and not s & free and not order.offset
    if not looks_back or not channels or any(f.axes & t and f.axes & s for f in leaves):
        return None
    value = [f for f in leaves if f.axes & s]
    weights = [f for f in leaves if f.axes & t]
    query = [f for f in leaves if f not in value and f not in weights]
    mixed = any(f.axes & channels for f in (*value, *weights))
    if not value or mixed or not all(is_weight(f.tensor) for f in query):
        return None
    if any(is_weight(f.tensor) for f in value):
        return None
    decay = common_exponent(product, order.row, order.column)
    assert decay is not None
    own = set().union(*(f.axes for f in (*query, *decay.of(Leaf)))) - channels
    inside = tuple(a for a in _ordered(value) if a not in s)
    batch = tuple(a for a in inside if a.size.known is None)
    widths = tuple(a for a in inside if a not in own and a not in batch)
    # A head is what has numbers of its own; it must be one that the value has.
    if not own <= t | set(inside) or not all(is_weight(f.tensor) for f in decay.of(Leaf)):
        return None
    return Roles(
        tuple(query),
        (),
        tuple(value),
        tuple(weights),
        None,
        decay,
        order.row,
        order.column,
        tuple(a for a in _ordered([*query, *decay.of(Leaf)]) if a in channels),
        widths,
        batch,
        causal=True,
    )


def _ordered(leaves: Iterable[Leaf]) -> Index:
    return tuple(dict.fromkeys(a for f in leaves for index in f.dims for a in index))
