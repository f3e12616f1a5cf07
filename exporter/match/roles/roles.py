"""Roles of the factors of a normal form: the query, the key, the value, the mask, the decay.

    sum_{s,d} [s <= t] q[b,h,t,d] k[b,h,s,d] v[b,h,s,e]  /  (scale sum [s <= t] q k + eps)

The labels tell: ``s`` and ``d`` are summed over; the key has both, the query only ``d``, the value
only ``s``; ``t`` and ``e`` are what the query and the value have for themselves; labels that
several of them share are the batch and the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.terms import Count, Leaf, Term


@dataclass(frozen=True)
class Transition:
    """The correction of a state, b_t (a_t^T S_{t-1}), see ``transition``.

    Attributes:
        heads: labels of the state that have a correction each.
        reads, writes: factors of a and of b.
        factor: a number, the same for all tokens.
    """

    heads: Index
    reads: tuple[Leaf, ...]
    writes: tuple[Leaf, ...]
    factor: float


@dataclass(frozen=True)
class Turn:
    """Angles and weights of channels that turn, in the place of queries and keys.

    Attributes:
        angle: of a token, b times its position.
        cosines, sines: products of stored numbers, whose sums a cosine and a sine are weighed by.
    """

    angle: Term
    cosines: tuple[Term, ...]
    sines: tuple[Term, ...]


@dataclass(frozen=True)
class ScoreProduct:
    """One of the products of queries and keys that scores are a sum of, see ``score_sums``.

    Attributes:
        query, key: factors of each.
        channels: the labels that are summed over.
        factor: of the product in the sum.
    """

    query: tuple[Leaf, ...]
    key: tuple[Leaf, ...]
    channels: Index
    factor: float


@dataclass(frozen=True)
class Roles:
    """The parts of one linear attention.

    Attributes:
        query, key, value: factors of each; no value means a value of one (a denominator), no query
            and key a recurrence.
        weights: factors of the output that differ from query to query, and not along its width.
        mask: a mask of the keys, True where they count.
        decay: what ``exp`` is taken of at the query's position, once for a gated recurrence.
        query_position, key_position: the position of the query (t) and of the key (s).
        channels, widths: d and e.
        batch: labels shared by all, outside the heads.
        scale, eps: as of the op; ``normalize`` as well.
        post: what the op's output is multiplied with, as a number and sizes.
        lag: a query meets keys up to that many tokens before it: 1 without its own.
        lags: keys, of tokens before the query, fade up to the token before it; at a constant rate.
        reverse: it meets those after it.
        stabilized: exponents of keys have ``running_maximum`` subtracted.
        from_zero: that maximum begins with 0, which fades as the keys do, see ``gates``.
        delta: a key's stored value is corrected, by the share ``beta`` (1 where there is none).
        bonus_terms: products of single tokens that are added to the output, see ``bonus_term``.
        initial: the state of a recurrence before the first token, see ``initial_state``.
        transition: a state is corrected by what a vector of its own reads.
        turn: channels of the state are pairs that turn as they fade.
        products: those that scores are a sum of, where they are one; the query, the key and the
            channels are those of all.
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
    lag: int = 0
    lags: bool = False
    reverse: bool = False
    stabilized: bool = False
    from_zero: bool = False
    delta: bool = False
    beta: Leaf | None = None
    bonus_terms: tuple[Term, ...] = ()
    initial: Term | None = None
    transition: Transition | None = None
    turn: Turn | None = None
    products: tuple[ScoreProduct, ...] = ()

    @property
    def features(self) -> int:
        """The width of a query or key, which is fixed; of channels that turn two each."""
        sides = [p.channels for p in self.products] or [self.channels]
        return sum(size_of(channels).known or 1 for channels in sides) * (2 if self.turn else 1)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Everything that is read from the graph."""
        mask = () if self.mask is None else (self.mask,)
        decay = () if self.decay is None else tuple(self.decay.of(Leaf))
        beta = () if self.beta is None else (self.beta,)
        terms = (*self.bonus_terms, *(() if self.initial is None else (self.initial,)))
        if self.turn is not None:
            terms += (self.turn.angle, *self.turn.cosines, *self.turn.sines)
        added = [f for term in terms for f in term.of(Leaf)]
        if self.transition is not None:
            added += (*self.transition.reads, *self.transition.writes)
        return (*self.query, *self.key, *self.value, *self.weights, *mask, *decay, *beta, *added)

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
