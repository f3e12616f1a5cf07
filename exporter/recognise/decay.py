"""What is in an exponent, as the decay of a gated recurrence.

    exp(X_t - X_s) with X_t = c t             decay c at every token            (RetNet)
                        X_t = sum_{u <= t} g_u  decay g                           (gated attention)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs

from linexport.recognise.axes import Axis, size_of
from linexport.recognise.roles import NotAttentionError
from linexport.recognise.terms import Iota, Leaf, Order

if TYPE_CHECKING:
    from linexport.recognise.emit import Writer


def write(writer: Writer, dtype: np.dtype[np.generic]) -> gs.Tensor:
    """The decay as (B, T, H_kv) or (B, T, H_kv * d).

    Raises:
        NotAttentionError: the exponent is of another form.
    """
    roles, term = writer.roles, writer.roles.decay
    assert term is not None
    leaves = term.of(Leaf)
    others = [f for f in term.factors if not isinstance(f, Leaf)]
    if len(others) != 1 or len(leaves) > 1:
        raise NotAttentionError("its decay is neither constant nor a cumulative sum")
    heads = writer.layout.value
    inside = {*roles.batch, *heads, *roles.channels}
    width = roles.channels if any(f.axes & set(roles.channels) for f in leaves) else ()
    source, time = others[0], roles.rows
    if isinstance(source, Order):
        if source.row != roles.rows or source.offset or len(leaves) != 1:
            raise NotAttentionError("its decay is a cumulative sum over other positions")
        time = source.column
    elif not isinstance(source, Iota) or source.index != roles.rows:
        raise NotAttentionError("its decay depends on something else than positions")
    outside: set[Axis] = set().union(*(f.axes for f in leaves)) - inside - set(time)
    if outside:
        raise NotAttentionError("its decay depends on labels that keys do not have")
    if not leaves:
        number = np.full((1, 1, size_of(heads).known or 1), term.coefficient, dtype)
        constant: gs.Tensor = gs.Constant(f"{writer.root.name}/decay", number)
        return writer.expanded(constant, heads, dtype)
    return writer.packed_decay(leaves[0], time, heads, width, term.coefficient, dtype)

