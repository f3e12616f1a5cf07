"""The decay of a gated recurrence, read from an exponent.

exp(X_t - X_s) with X_t = c t                   decay c at every token      (RetNet)
                    X_t = sum_{u <= t} g_u      decay g                     (gated attention)
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.recognise.axes import Index
from linexport.recognise.roles import NotAttentionError, Roles
from linexport.recognise.terms import Iota, Leaf, PositionOrder


@dataclass(frozen=True)
class Decay:
    """``coefficient`` times a leaf, or alone where there is none, at every position of ``time``.

    ``width`` has the labels of channels, where every channel decays by itself.
    """

    leaf: Leaf | None
    time: Index
    width: Index
    coefficient: float


def read_decay(roles: Roles, heads: Index) -> Decay:
    """The decay of the roles, for keys and values of these heads.

    Raises:
        NotAttentionError: the exponent is of another form.
    """
    term = roles.decay
    assert term is not None
    leaves = term.of(Leaf)
    others = [f for f in term.factors if not isinstance(f, Leaf)]
    if len(others) != 1 or len(leaves) > 1:
        raise NotAttentionError("its decay is neither constant nor a cumulative sum")
    source, time = others[0], roles.query_position
    if isinstance(source, PositionOrder):
        # sum_u [u <= t] g_u up to and including t: X_t - X_{t-1} = g_t.
        if source.row != roles.query_position or source.offset or not leaves:
            raise NotAttentionError("its decay is a cumulative sum over other positions")
        time = source.column
    # c t grows by c from each position to the next.
    elif not isinstance(source, Iota) or source.index != roles.query_position:
        raise NotAttentionError("its decay depends on something else than positions")
    leaf = leaves[0] if leaves else None
    own = frozenset() if leaf is None else leaf.axes
    # One decay serves all values of a key head: it may not depend on the width of the value.
    if own - {*roles.batch, *heads, *roles.channels, *time}:
        raise NotAttentionError("its decay depends on labels that keys do not have")
    width = roles.channels if own & set(roles.channels) else ()
    return Decay(leaf, time, width, term.coefficient)
