"""Factors of one product sorted into roles: by the labels that they share.

    sum_{s,d} [s <= t] q[b,h,t,d] k[b,h,s,d] v[b,h,s,e]

Labels of the result are free, those summed over are bound. With a triangle, t and s are the two
positions it compares. Without one, every group of bound labels is tried as s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.operators import COPIES, LAYOUT
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.terms import TURNS, Form, Leaf, Nested, PositionOrder, Term
from linexport.match.roles.decay import common_exponent
from linexport.match.roles.labels import Labelled, Positions, axes_of, ordered
from linexport.match.roles.recurrence import read_recurrence
from linexport.match.roles.roles import Roles

Axes = frozenset[Axis]


MASKS = "make a causal mask in the model (tril), and mask tokens by a mask of keys"

SEGMENTS = (
    "it is made by comparing a number of each query with one of each key, as segments between "
    "resets are. A state that is cleared is fused as a loop over tokens, in which each step begins "
    "with state = torch.where(reset[:, t], 0, state), for each head by itself or for all"
)

SAME_TRUTH = COPIES | LAYOUT | {"Not", "Where"}
"""Operators that give what their first input says, or the opposite."""


def _is_comparison(tensor: gs.Tensor) -> bool:
    """Return whether a mask says which queries and keys have the same number."""
    node = producer(tensor)
    while node is not None and node.op in SAME_TRUTH:
        node = producer(node.inputs[0])
    return node is not None and node.op == "Equal"


def assign_roles(
    product: Term, form: Form, fits: Callable[[Roles], bool] = lambda _: True
) -> Roles | None:
    """Try the ways to tell positions from channels, and take the most natural that fits.

    Args:
        product: the numerator.
        form: of the whole value.
        fits: says of one way whether the denominator is of the same queries and keys. Where all
            sizes are fixed, nothing else tells a query from a value.
    """
    free, bound = form.axes, product.axes - form.axes
    if not bound or product.axes & free != free:
        return None
    orders = product.of(PositionOrder)
    leaves = [f for f in product.of(Leaf) if f.axes]
    if len(leaves) != len(product.of(Leaf)):
        return None
    if any(f.kind in ("log", *TURNS) for f in product.of(Nested)):
        return None
    if orders:
        roles = _causal(product, orders, leaves, free, bound)
        return read_recurrence(product, form) if roles is None else roles
    found = list(_bidirectional(product, leaves, free, bound))
    return min(found, key=lambda one: (not fits(one), *_ambiguity_rank(one)), default=None)


def _causal(
    product: Term, orders: list[PositionOrder], leaves: list[Leaf], free: Axes, bound: Axes
) -> Roles | None:
    # sum_s [s <= t] looks back from a query t that is a dim to keys s that are summed over;
    # [t <= s], with the two exchanged, looks ahead.
    # The triangle names both positions: the one that is summed over is the key's.
    positions = Positions.of(orders[0], free, bound)
    if positions is None:
        return None
    query, key = positions.query, positions.key
    roles = _sides(product, leaves, query, key, bound - set(key), free)
    if roles is None:
        return None
    if len(orders) > 1:
        raise NotAttentionError("it has more than one mask by position, such as a window")
    if positions.offset > 0:
        raise NotAttentionError(
            f"its triangle is shifted by {positions.offset}; only a mask that ends at the "
            "diagonal, or before it, is causal linear attention"
        )
    if positions.reverse and roles.decay is not None:
        raise NotAttentionError("its mask keeps later positions, and its keys fade")
    return replace(roles, causal=True, lag=-positions.offset, reverse=positions.reverse)


def _bidirectional(product: Term, leaves: list[Leaf], free: Axes, bound: Axes) -> Iterator[Roles]:
    # Without a triangle nothing names the positions: labels that are summed over are put together
    # by the factors that have them, and each group is tried as the positions of the keys.
    patterns: dict[frozenset[int], list[Axis]] = {}
    for axis in ordered(leaves, bound):
        members = frozenset(i for i, f in enumerate(leaves) if axis in f.axes)
        patterns.setdefault(members, []).append(axis)
    for members in sorted(patterns, key=lambda m: _is_fixed(patterns[m])):
        key_position = tuple(patterns[members])
        channels = bound - set(key_position)
        queries = {i for i, f in enumerate(leaves) if f.axes & channels and i not in members}
        own = ordered([leaves[i] for i in sorted(queries)], free)
        keys = [f for i, f in enumerate(leaves) if i in members and f.axes & channels]
        elsewhere = set().union(*(f.axes for f in keys))
        query_position = _positions([a for a in own if a not in elsewhere], key_position)
        if channels and query_position:
            try:
                roles = _sides(product, leaves, query_position, key_position, channels, free)
            except NotAttentionError:
                if not _is_fixed(key_position):
                    raise
                continue  # channels, read as positions
            if roles is not None:
                yield roles


def _is_fixed(positions: Sequence[Axis]) -> bool:
    return size_of(tuple(positions)).known is not None


def _positions(own: list[Axis], key_position: Index) -> Index:
    """The query's own labels that are positions: as long as the key's."""
    if own and size_of(tuple(own)) == size_of(key_position):
        return tuple(own)  # rows and columns of an image, say, where keys have both in one label
    query_position = []
    for column in key_position:
        same = [a for a in own if a.size == column.size and a not in query_position]
        if not same:
            # Queries of another length: cross attention.
            return tuple(a for a in own if a.size.known is None)[:1] or tuple(own[:1])
        query_position.append(same[0])
    return tuple(query_position)


def _ambiguity_rank(roles: Roles) -> tuple[bool, bool, bool]:
    """Rank a reading, the best first: dynamic positions, as many for keys as for queries."""
    query_position, key_position = size_of(roles.query_position), size_of(roles.key_position)
    fixed = query_position.known is not None or key_position.known is not None
    return fixed, query_position != key_position, not roles.value


def _sides(
    product: Term,
    leaves: list[Leaf],
    query_position: Index,
    key_position: Index,
    channels: Axes,
    free: Axes,
) -> Roles | None:
    """Sort factors into query, key, value and mask: see ``labels``."""
    found = Labelled.of(leaves, query_position, key_position, channels)
    if found.neither or (found.both and len(leaves) < 3):
        return None
    query, key, weights = found.t_channels, found.s_channels, found.t
    # A score is a sum over channels of a query and a key.
    if not query or not key or not channels:
        return None
    if found.both:
        raise NotAttentionError(_multiplied(found.both[0].tensor))
    of_scores = axes_of((*query, *key))
    masks, value = _masks_and_values(found.s, of_scores.union(key_position))
    decay = common_exponent(product, query_position, key_position)
    # Heads are shared with queries or keys, so what the value alone has is its width. What decays
    # by itself is a head: each of Mamba's channels, which share queries and keys.
    heads = of_scores.union(query_position, key_position, channels)
    heads |= axes_of(decay.of(Leaf)) if decay else frozenset()
    widths = ordered(value, free - heads)
    # Where the value has a width, a factor without one belongs to the key: the denominator has
    # it as well.
    if widths:
        key += tuple(f for f in value if not f.axes & set(widths))
        value = tuple(f for f in value if f.axes & set(widths))
    if len(masks) > 1 or not _weigh_queries(weights, value, widths, product):
        return None
    roles = Roles(
        query=query,
        key=key,
        value=value,
        weights=weights,
        mask=masks[0] if masks else None,
        decay=decay,
        query_position=query_position,
        key_position=key_position,
        channels=ordered(query, channels),
        widths=widths,
        batch=(),
        causal=False,
    )
    if len(roles.channels) != len(channels):
        return None
    return replace(roles, batch=_batch(roles))


def _masks_and_values(
    found: Sequence[Leaf], of_scores: Axes
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Split what keys have without channels: a mask is a truth value for a whole score."""
    # Truth values that have a width are values, such as spikes.
    truths = [f for f in found if f.truth]
    masks = tuple(f for f in truths if f.axes <= of_scores)
    rest = (f for f in truths if f not in masks)
    return masks, (*(f for f in found if not f.truth), *rest)


def _multiplied(tensor: gs.Tensor) -> str:
    """Return why a factor with a number for each query and key is in the way."""
    return (
        f"{tensor.name}, with a number for each query and key, multiplies its "
        "scores and is not known to be a triangle or a decay: "
        f"{SEGMENTS if _is_comparison(tensor) else MASKS}"
    )


def _weigh_queries(
    weights: Sequence[Leaf], value: Sequence[Leaf], widths: Index, product: Term
) -> bool:
    """Return whether weights are numbers for each query: any product may be, without a value."""
    if not weights:
        return True
    summed = value or product.of(PositionOrder)
    # A factor without the position of keys can be taken out of the sum over them.
    return bool(summed) and not axes_of(weights) & set(widths)


def _batch(roles: Roles) -> Index:
    """Return shared labels that are not heads: of dynamic size, or else the first of several."""
    groups = [g for g in (roles.query, roles.key, roles.value) if g]
    shared = ordered(roles.leaves, set.intersection(*map(roles.heads, groups)))
    dynamic = tuple(a for a in shared if a.size.known is None)
    if dynamic or not shared:
        return dynamic
    inside = {*roles.channels, *roles.widths}
    packed = any(
        shared[0] in index and inside & set(index) for f in roles.leaves for index in f.dims
    )
    return () if packed else (shared[0],)
