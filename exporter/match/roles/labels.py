"""Factors of a product by the labels that they have: the table that roles are read from.

    labels            attention     recurrence        fixed queries
    t                 weights       weights           weights
    t and channels    query         -                 -
    s                 value, mask   value             value
    s and channels    key           -                 -
    t and s           -             -                 -
    neither           -             weights           query, which is stored

t is the position of the query, s that of the key, and channels are the other labels summed over. A
column says what a reader takes the factors of a row for; it leaves products that have others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.terms import Leaf, PositionOrder


@dataclass(frozen=True)
class Positions:
    """The two positions that an order of a product compares.

    Attributes:
        query, key: a label each for every dimension of the position.
        reverse: the query meets keys after it.
        offset: the query meets keys up to that many tokens after it.
    """

    query: Index
    key: Index
    reverse: bool
    offset: int

    @classmethod
    def of(
        cls, order: PositionOrder, free: frozenset[Axis], bound: frozenset[Axis]
    ) -> Positions | None:
        """Read them: the key's are bound by the sum, the query's are free. None for any others."""
        if set(order.column) <= bound and set(order.row) <= free:
            return cls(order.row, order.column, False, order.offset)
        # With the two exchanged the sum runs over later keys.
        if set(order.row) <= bound and set(order.column) <= free:
            return cls(order.column, order.row, True, order.offset)
        return None


@dataclass(frozen=True)
class Labelled:
    """Factors by their labels, each kind in the order of the product."""

    t: tuple[Leaf, ...]
    t_channels: tuple[Leaf, ...]
    s: tuple[Leaf, ...]
    s_channels: tuple[Leaf, ...]
    both: tuple[Leaf, ...]
    neither: tuple[Leaf, ...]

    @classmethod
    def of(
        cls, leaves: Iterable[Leaf], query: Index, key: Index, channels: Collection[Axis]
    ) -> Labelled:
        """Sort factors by the positions of query and key, and by the channels."""
        found: dict[tuple[bool, bool, bool], list[Leaf]] = {}
        t, s, inner = set(query), set(key), set(channels)
        for leaf in leaves:
            has_t, has_s = bool(leaf.axes & t), bool(leaf.axes & s)
            one_position = has_t != has_s
            kind = has_t, has_s, one_position and bool(leaf.axes & inner)
            found.setdefault(kind, []).append(leaf)
        rows = {kind: tuple(some) for kind, some in found.items()}
        return cls(
            t=rows.get((True, False, False), ()),
            t_channels=rows.get((True, False, True), ()),
            s=rows.get((False, True, False), ()),
            s_channels=rows.get((False, True, True), ()),
            both=rows.get((True, True, False), ()),
            neither=rows.get((False, False, False), ()),
        )


def axes_of(leaves: Iterable[Leaf]) -> frozenset[Axis]:
    """Return the labels that some of the factors have."""
    return frozenset().union(*(f.axes for f in leaves))


def ordered(leaves: Iterable[Leaf], of: Collection[Axis]) -> Index:
    """Return some labels in the order in which the factors have them."""
    seen = (a for f in leaves for index in f.dims for a in index if a in of)
    return tuple(dict.fromkeys(seen))


def batch_and_widths(
    value: Sequence[Leaf], key: Index, own: Collection[Axis]
) -> tuple[Index, Index]:
    """Split what a value has but its position: into the batch, of dynamic size, and its width.

    Labels in ``own`` are heads: they have a decay, or stored numbers, of their own.
    """
    inside = ordered(value, axes_of(value) - set(key))
    batch = tuple(a for a in inside if a.size.known is None)
    return batch, tuple(a for a in inside if a not in own and a not in batch)
