"""Sums over tensors with a zero in front, as sums over what is behind it.

    sum_{m <= T} [m <= t] x_m,  t < T,  x = zeros(1) ++ y      is      sum_{m < T} [m <= t - 1] y_m

as Mamba-2's published code has the states of its chunks: with an initial one that is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from linexport.graph.monomials import Size
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index, size_of, unify
from linexport.match.forms.evaluate import Along, Evaluator
from linexport.match.forms.terms import (
    IDENTITY,
    Factor,
    Form,
    Iota,
    Leaf,
    Nested,
    PositionOrder,
    Term,
)
from linexport.match.forms.unify import collect

Axes = frozenset[Axis]


def made_of(found: Along, leaf: Leaf, index: Index) -> Form | None:
    """Return what a tensor was made of, with the leaf's labels and ``index`` along the change."""
    form = found.form.fresh()
    for place, own_index in enumerate(leaf.dims):
        own = form.dims[place]
        target = index if place == found.place else own_index
        shared = unify(target, own) if own or target else {}
        if shared is None or any(a in leaf.axes or a in target for a in shared):
            return None
        form = form.rename(shared)
    return form


def first_of_sums(e: Evaluator, form: Form, place: int) -> Form | None:
    """Return a form without the last position of a dim, where its sums begin with a zero."""
    index = form.dims[place]
    size = next(_sizes_behind(e, form, size_of(index)), None)
    if len(index) != 1 or size is None:
        return None
    kept = Axis(size)
    terms = [
        _BehindZero(e, index[0].size, kept)(t, form.axes, {index[0]: kept}) for t in form.terms
    ]
    dims = tuple((kept,) if p == place else i for p, i in enumerate(form.dims))
    known = tuple(t for t in terms if t is not None)
    return collect(Form(dims, known)) if len(known) == len(terms) else None


def _sizes_behind(e: Evaluator, form: Form, whole: Size) -> Iterator[Size]:
    """Yield sizes of tensors that a zero was put in front of to that of a dim."""
    for factor in (f for term in form.terms for f in term.factors):
        if isinstance(factor, Nested):
            yield from _sizes_behind(e, factor.inner, whole)
        elif isinstance(factor, Leaf) and factor.tensor.name in e.delayed:
            found = e.delayed[factor.tensor.name]
            if size_of(factor.dims[found.place]) == whole:
                yield size_of(found.form.dims[found.place])


@dataclass(frozen=True)
class _BehindZero:
    """Terms of sums over T + 1 positions, as sums over the T behind the first.

    Attributes:
        e: knows what has a zero in front.
        whole: T + 1.
        kept: a dim without its last position.
    """

    e: Evaluator
    whole: Size
    kept: Axis

    def __call__(self, term: Term, free: Axes, known: Mapping[Axis, Axis]) -> Term | None:
        """Return a term; ``known`` has the new labels of those around it."""
        zeros = {a for f in term.of(Leaf) for a in self._zero(f)}
        bound = {a for a in term.axes - free if a.size == self.whole}
        # The first summand must be zero to be left out.
        if not bound <= zeros:
            return None
        known = {**known, **{a: Axis(self.kept.size) for a in bound}}
        result = Term(term.coefficient)
        for factor in term.factors:
            moved = self._factor(factor, known)
            product = None if moved is None else algebra.multiplied(result, moved)
            if product is None:
                return None
            result = product
        return result

    def _zero(self, leaf: Leaf) -> Index:
        """Return the label along which a tensor begins with a zero."""
        found = self.e.delayed.get(leaf.tensor.name)
        plain = found is not None and leaf.function == IDENTITY
        return leaf.dims[found.place] if found is not None and plain else ()

    def _factor(self, factor: Factor, known: Mapping[Axis, Axis]) -> Term | None:
        touched = factor.axes & set(known)
        if not touched:
            return Term(1.0, (factor,))
        if isinstance(factor, Leaf):
            return self._leaf(factor, known)
        if isinstance(factor, Nested):
            free = frozenset(factor.axes)
            terms = [self(t, free, known) for t in factor.inner.terms]
            inner = tuple(t for t in terms if t is not None)
            dims = tuple((known.get(a, a),) for a in free)
            nested = algebra.nested(factor.kind, Form(dims, inner))
            return Term(1.0, (nested,)) if len(inner) == len(terms) else None
        moved = factor.rename({a: (b,) for a, b in known.items()})
        if isinstance(factor, PositionOrder) and isinstance(moved, PositionOrder):
            # [m + 1 <= t] is [m <= t - 1]; the label that is kept counts from the zero on.
            by = sum(
                sign * (index[0] in touched and known[index[0]] is not self.kept)
                for sign, index in ((1, factor.row), (-1, factor.column))
            )
            return Term(1.0, (replace(moved, offset=moved.offset + by),))
        plain = isinstance(factor, Iota) and {known[a] for a in touched} == {self.kept}
        return Term(1.0, (moved,)) if plain else None

    def _leaf(self, leaf: Leaf, known: Mapping[Axis, Axis]) -> Term | None:
        """Return the tensor behind the zero, of all that depends on a label that is summed over."""
        index = self._zero(leaf)
        if len(index) != 1 or leaf.axes & set(known) != set(index) or known[index[0]] is self.kept:
            return None
        form = made_of(self.e.delayed[leaf.tensor.name], leaf, (known[index[0]],))
        return form.terms[0] if form is not None and len(form.terms) == 1 else None
