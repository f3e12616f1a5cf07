"""Roles of the factors of a normal form: the query, the key, the value, the mask, the decay.

    sum_{s,d} [s <= t] q[b,h,t,d] k[b,h,s,d] v[b,h,s,e]  /  (scale sum [s <= t] q k + eps)

The labels tell: ``s`` and ``d`` are summed over; the key has both, the query only ``d``, the value
only ``s``; ``t`` and ``e`` are what the query and the value have for themselves; labels that
several of them share are the batch and the heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs

from linexport.recognise.axes import Axis, Index, size_of
from linexport.recognise.joining import match
from linexport.recognise.terms import Count, Factor, Form, Leaf, Nested, PositionOrder, Term

Axes = frozenset[Axis]

WIDEST = 512
"""Features of a power of query times key, above which the state is larger than what it saves."""


@dataclass(frozen=True)
class Roles:
    """The parts of one linear attention.

    Attributes:
        query, key, value: factors of each; no value means a value of one (a denominator).
        weights: factors of the output that differ from query to query, and not along its width.
        mask: a mask of the keys, True where they count.
        decay: what ``exp`` is taken of at the query's position, once for a gated recurrence.
        query_position, key_position: the position of the query (t) and of the key (s).
        channels, widths: d and e.
        batch: labels shared by all, outside the heads.
        scale, eps: as of the op; ``normalize`` as well.
        post: what the op's output is multiplied with, as a number and sizes.
    """

    query: tuple[Leaf, ...]
    key: tuple[Leaf, ...]
    value: tuple[Leaf, ...]
    weights: tuple[Leaf, ...]
    mask: Leaf | None
    decay: Term | None
    query_position: Index
    key_position: Index
    channels: Index
    widths: Index
    batch: Index
    causal: bool
    normalize: bool = False
    scale: float = 1.0
    eps: float = 0.0
    post: float = 1.0
    post_counts: tuple[Count, ...] = field(default=())

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Everything that is read from the graph."""
        mask = () if self.mask is None else (self.mask,)
        decay = () if self.decay is None else tuple(self.decay.of(Leaf))
        return (*self.query, *self.key, *self.value, *self.weights, *mask, *decay)

    def heads(self, leaves: Sequence[Leaf]) -> set[Axis]:
        """Head labels of some factors."""
        other = {
            *self.query_position,
            *self.key_position,
            *self.channels,
            *self.widths,
            *self.batch,
        }
        return set().union(*(f.axes for f in leaves)) - other


class NotAttentionError(Exception):
    """A condition failed on what looked like attention; the text says which."""


def read_roles(form: Form, is_weight: Callable[[gs.Tensor], bool]) -> Roles | None:
    """The roles in a form; None where it has nothing of attention.

    Raises:
        NotAttentionError: it is a product of query, key and value, but not linear attention.
    """
    if len(form.terms) != 1:
        return None
    term = form.terms[0]
    # a x / (b n), with a number a and sizes n: these do not depend on positions, so they are moved
    # out of the sum, and the product that is left is the numerator.
    over = [f for f in term.of(Nested) if f.kind == "one over"]
    counts = tuple(term.of(Count))
    product = Term(1.0, tuple(f for f in term.factors if f not in over and f not in counts))
    roles = _roles(product, form)
    if roles is None or len(over) > 1:
        return None
    # A product with a stored tensor is a projection, not a query times a key.
    if any(is_weight(f.tensor) for f in (*roles.query, *roles.key, *roles.value)):
        return None
    roles = replace(roles, post=term.coefficient, post_counts=counts)
    if over:
        roles = _normalised(roles, product, over[0])
    _sensible(roles)
    return roles


def _roles(product: Term, form: Form) -> Roles | None:
    """Try the ways to tell positions from channels, and take the most natural that fits."""
    free, bound = form.axes, product.axes - form.axes
    if not bound or product.axes & free != free:
        return None
    orders = product.of(PositionOrder)
    leaves = [f for f in product.of(Leaf) if f.axes]
    if len(leaves) != len(product.of(Leaf)):
        return None
    if orders:
        return _causal(product, orders, leaves, free, bound)
    found = list(_bidirectional(product, leaves, free, bound))
    return min(found, key=_ambiguity_rank, default=None)


def _causal(
    product: Term, orders: list[PositionOrder], leaves: list[Leaf], free: Axes, bound: Axes
) -> Roles | None:
    # sum_s [s <= t] looks back from a query t that is a dim to keys s that are summed over;
    # [t <= s], with the two exchanged, looks ahead.
    order = orders[0]
    looks = set(order.column) <= bound and set(order.row) <= free
    reverse = set(order.row) <= bound and set(order.column) <= free
    if not looks and not reverse:
        return None
    query_position, key_position = (order.row, order.column) if looks else (order.column, order.row)
    roles = _sides(product, leaves, query_position, key_position, bound - set(key_position), free)
    if roles is None:
        return None
    if len(orders) > 1:
        raise NotAttentionError("it has more than one mask by position, such as a window")
    if reverse:
        raise NotAttentionError("its mask keeps later positions: it runs backwards in time")
    if order.offset:
        raise NotAttentionError(
            f"its triangle is shifted by {order.offset}; only a mask that includes the diagonal "
            "and nothing above it is causal linear attention"
        )
    return replace(roles, causal=True)


def _bidirectional(product: Term, leaves: list[Leaf], free: Axes, bound: Axes) -> Iterator[Roles]:
    # Without a triangle nothing names the positions: labels that are summed over are put together
    # by the factors that have them, and each group is tried as the positions of the keys.
    patterns: dict[frozenset[int], list[Axis]] = {}
    for axis in _ordered(leaves, bound):
        members = frozenset(i for i, f in enumerate(leaves) if axis in f.axes)
        patterns.setdefault(members, []).append(axis)
    for members in patterns:
        key_position = tuple(patterns[members])
        channels = bound - set(key_position)
        queries = {i for i, f in enumerate(leaves) if f.axes & channels and i not in members}
        own = _ordered([leaves[i] for i in sorted(queries)], free)
        keys = [f for i, f in enumerate(leaves) if i in members and f.axes & channels]
        elsewhere = set().union(*(f.axes for f in keys))
        query_position = _positions([a for a in own if a not in elsewhere], key_position)
        if channels and query_position:
            roles = _sides(product, leaves, query_position, key_position, channels, free)
            if roles is not None:
                yield roles


def _positions(own: list[Axis], key_position: Index) -> Index:
    """The query's own labels that are positions: as long as the key's."""
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


def _ordered(leaves: Sequence[Leaf], of: Axes) -> list[Axis]:
    """Labels in the order in which the factors have them."""
    seen = [a for f in leaves for index in f.dims for a in index if a in of]
    return list(dict.fromkeys(seen))


def _sides(
    product: Term,
    leaves: list[Leaf],
    query_position: Index,
    key_position: Index,
    channels: Axes,
    free: Axes,
) -> Roles | None:
    """Sort factors into query, key, value and mask."""
    # A factor with t moves out of the sum over s, one with s stays inside. Of the former those with
    # channels d are the query, the others weigh the output; of the latter those with channels are
    # the key, truth values the mask, the others the value. One with both t and s is a full mask.
    t, s = set(query_position), set(key_position)
    query, key, value, mask = list[Leaf](), list[Leaf](), list[Leaf](), list[Leaf]()
    weights, masklike = list[Leaf](), list[Leaf]()
    for leaf in leaves:
        if leaf.axes & t and leaf.axes & s:
            if len(leaves) < 3:
                return None
            masklike.append(leaf)
        elif leaf.axes & t:
            (query if leaf.axes & channels else weights).append(leaf)
        elif leaf.axes & s:
            own = leaf.axes & channels
            (key if own else mask if leaf.truth else value).append(leaf)
        else:
            return None
    if not query or not key or not channels:
        return None
    if masklike:
        raise NotAttentionError(
            f"{masklike[0].tensor.name} multiplies the scores and is not known to be triangular"
        )
    # Heads are shared with queries or keys, so what the value alone has is its width.
    inside = {*query_position, *key_position, *channels}
    elsewhere = set().union(*(f.axes for f in (*query, *key))) | inside
    widths = tuple(a for a in _ordered(value, free) if a not in elsewhere)
    weighs_queries = value and not any(f.axes & set(widths) for f in weights)
    if len(mask) > 1 or (weights and not weighs_queries):
        return None
    roles = Roles(
        tuple(query),
        tuple(key),
        tuple(value),
        tuple(weights),
        mask[0] if mask else None,
        _decay(product, query_position, key_position),
        query_position,
        key_position,
        tuple(_ordered(query, channels)),
        widths,
        (),
        causal=False,
    )
    if len(roles.channels) != len(channels):
        return None
    return replace(roles, batch=_batch(roles))


def _decay(product: Term, query_position: Index, key_position: Index) -> Term | None:
    """Return X where exp(X_t) and exp(-X_s) are factors; None without exps."""
    exps = [f for f in product.of(Nested) if f.kind == "exp"]
    if not exps:
        return None
    if any(len(f.inner.terms) != 1 for f in exps):
        raise NotAttentionError("exp is taken of a sum of several things")
    both = [f for f in exps if f.axes & set(query_position) and f.axes & set(key_position)]
    if both:
        raise NotAttentionError("exp is taken of query times key, which is softmax attention")
    at_row = [f.inner.terms[0] for f in exps if f.axes & set(query_position)]
    at_column = [f.inner.terms[0] for f in exps if f.axes & set(key_position)]
    if len(at_row) != 1 or len(at_column) != 1 or len(exps) != 2:
        raise NotAttentionError("its decay is not one factor for queries and its inverse for keys")
    # exp(X_t - X_s) is a product of decays between s and t only if both sides have the same X: the
    # key's exponent, with t for s and the other sign, must be the query's.
    moved = (
        at_column[0]
        .scaled(-1.0)
        .rename({s: (t,) for s, t in zip(key_position, query_position, strict=True)})
    )
    shared = frozenset(at_row[0].axes | moved.axes) & frozenset(product.axes)
    same_rate = math.isclose(moved.coefficient, at_row[0].coefficient)
    if not same_rate or match(at_row[0], moved, shared) is None:
        raise NotAttentionError("the decays of queries and of keys differ")
    return at_row[0]


def _batch(roles: Roles) -> Index:
    """Return shared labels that are not heads: of dynamic size, or else the first of several."""
    groups = [g for g in (roles.query, roles.key, roles.value) if g]
    shared = _ordered(roles.leaves, frozenset(roles.heads(groups[0])))
    shared = [a for a in shared if all(a in roles.heads(g) for g in groups)]
    dynamic = tuple(a for a in shared if a.size.known is None)
    if dynamic or not shared:
        return dynamic
    inside = {*roles.channels, *roles.widths}
    packed = any(
        shared[0] in index and inside & set(index) for f in roles.leaves for index in f.dims
    )
    return () if packed else (shared[0],)


def _normalised(roles: Roles, product: Term, over: Nested) -> Roles:
    """Return the roles with the denominator ``over`` stands for, as normaliser, scale and eps."""
    eps = sum(t.coefficient for t in over.inner.terms if not t.factors)
    sums = [t for t in over.inner.terms if t.factors]
    if len(sums) != 1:
        raise NotAttentionError("its denominator is not one sum over keys plus a number")
    # A size n divides out of numerator and denominator: x / (z / n) = n x / z. Not with an epsilon,
    # as z / n + eps is not (z + eps) / n.
    counts = tuple(sums[0].of(Count))
    if counts and eps:
        raise NotAttentionError("its epsilon is added to a denominator that a length divides")
    factors: list[Factor] = [f for f in sums[0].factors if f not in counts]
    # The denominator is the numerator with a value of one: every other factor must be there, too.
    # Factors of the query position alone are outside both sums.
    outside = {*map(id, roles.value), *map(id, roles.weights)}
    numerator = Term(1.0, tuple(f for f in product.factors if id(f) not in outside))
    if match(numerator, Term(1.0, tuple(factors)), over.inner.axes) is None:
        raise NotAttentionError(
            "its denominator is not the sum over the same queries and keys as its numerator"
        )
    # x / (c z + eps) = (1 / c) (c x) / (c z + eps): the op scales its scores by c in both sums.
    scale = sums[0].coefficient
    inverse = tuple(replace(c, power=-c.power) for c in counts)
    return replace(
        roles,
        normalize=True,
        scale=scale,
        eps=eps,
        post=roles.post / scale,
        post_counts=_cancelled((*roles.post_counts, *inverse)),
    )


def _cancelled(counts: tuple[Count, ...]) -> tuple[Count, ...]:
    # n (1 / n) = 1.
    left: list[Count] = []
    for count in counts:
        opposite = replace(count, power=-count.power)
        if opposite in left:
            left.remove(opposite)
        else:
            left.append(count)
    return tuple(left)


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
