"""Scores that are a sum of products, read as one product of features side by side.

    sum_i c_i q_i . k_i  =  [c_1 q_1, c_2 q_2, ..] . [k_1, k_2, ..]

Every term of the form is read by itself, with the term of the denominator that belongs to it. They
are one attention where they meet the same values under the same triangle, decay and mask. Factors
that only some of them have, such as cos(w t) and cos(w s), belong to their queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis
from linexport.match.forms.terms import Form, Leaf, Nested, Term
from linexport.match.forms.unify import equal_up_to_names
from linexport.match.roles.roles import Roles, ScoreProduct

Read = Callable[[Form], Roles | None]

EQUAL = 1e-6
"""Largest relative difference of numbers that are equal."""


def read_score_sum(form: Form, read: Read) -> Roles | None:
    """Return the roles of a form of several terms; None where these are not one attention.

    Args:
        form: with two terms or more.
        read: gives the roles of a form of one term.
    """
    if not all(t.axes - form.axes for t in form.terms):
        return None
    parts = list[Roles]()
    for choices in _single(form):
        found = next(_readable(choices, parts, read), None)
        if found is None:
            return None
        parts.append(found)
    return _joined(parts, form.axes) if parts else None


def _single(form: Form) -> Iterator[list[Form]]:
    """Yield for each term the forms that it may be by itself: over each term of a denominator."""
    overs = [[f for f in t.of(Nested) if f.kind == "one over"] for t in form.terms]
    if not any(overs):
        yield from ([replace(form, terms=(t,))] for t in form.terms)
        return
    first = overs[0]
    alike = all(len(o) == 1 and _equal(o[0], first[0], form.axes) for o in overs if first)
    sums = [t for t in first[0].inner.terms if t.factors] if first and alike else []
    if len(sums) != len(form.terms):
        return
    for term, (over,) in zip(form.terms, overs, strict=True):
        rest = tuple(f for f in term.factors if f is not over)
        numbers = tuple(t for t in over.inner.terms if not t.factors)
        below = [t for t in over.inner.terms if t.factors]
        yield [
            replace(form, terms=(Term(term.coefficient, (*rest, _over(over, (t, *numbers)))),))
            for t in below
        ]


def _over(over: Nested, terms: tuple[Term, ...]) -> Nested:
    return replace(over, inner=replace(over.inner, terms=terms))


def _equal(a: Nested, b: Nested, free: frozenset[Axis]) -> bool:
    return equal_up_to_names(Term(1.0, (a,)), Term(1.0, (b,)), free)


def _readable(choices: Sequence[Form], parts: Sequence[Roles], read: Read) -> Iterator[Roles]:
    """Yield the roles of a term, with the labels of key positions that other terms have."""
    for form in choices:
        try:
            found = read(form)
            if found is not None and parts:
                found = _with_keys_of(parts[0], found, form, read)
        except NotAttentionError:
            continue
        if found is not None and found.query and found.key and not found.products:
            yield found


def _with_keys_of(first: Roles, found: Roles, form: Form, read: Read) -> Roles | None:
    """Return the roles with the key positions of other ones: both are summed over."""
    own, names = found.key_position, first.key_position
    if [a.size for a in own] != [a.size for a in names]:
        return None
    if own == names:
        return found
    if set(names) & form.terms[0].axes:  # they are labels of something else here
        return None
    return read(form.rename({a: (b,) for a, b in zip(own, names, strict=True)}))


def _joined(parts: Sequence[Roles], free: frozenset[Axis]) -> Roles | None:
    """Return the roles of the sum of several attentions; None where they differ in more."""
    first = parts[0]
    if not all(_alike(first, part, free) for part in parts):
        return None
    # A label that some queries and keys have is of heads, where it is of the width for others.
    widths = tuple(a for a in first.widths if all(a in p.widths for p in parts))
    # sum_i (q_i . k_i) v = (sum_i q_i . k_i) v: what all terms share is a factor of the sum.
    value = _common([p.value for p in parts])
    weights = _common([p.weights for p in parts])
    products = list[ScoreProduct]()
    for part in parts:
        keys = tuple(f for f in part.value if f not in value)
        if any(f.axes & set(widths) for f in keys):
            return None  # another value, which needs a state of its own
        queries = tuple(f for f in part.weights if f not in weights)
        # A denominator has what belongs to queries and keys as well, or it is another sum.
        if part.normalize and (keys or queries):
            return None
        # The first term's number is a factor of the sum, so that others are relative to it.
        number = part.scale / first.scale if part.normalize else part.post / first.post
        query, key = (*part.query, *queries), (*part.key, *keys)
        products.append(ScoreProduct(query, key, part.channels, number))
    return replace(
        first,
        query=tuple(f for p in products for f in p.query),
        key=tuple(f for p in products for f in p.key),
        value=value,
        weights=weights,
        channels=tuple(a for p in products for a in p.channels),
        widths=widths,
        products=tuple(products),
    )


def _common(groups: Sequence[tuple[Leaf, ...]]) -> tuple[Leaf, ...]:
    return tuple(f for f in groups[0] if all(f in group for group in groups))


def _alike(a: Roles, b: Roles, free: frozenset[Axis]) -> bool:
    """Return whether attentions have the same positions, masks, decays and numbers."""
    plain = ("stabilized", "delta", "transition", "turn", "initial", "bonus_terms")
    same = ("query_position", "key_position", "mask", "causal", "normalize", "eps", "post_counts")
    if any(getattr(x, name) for x in (a, b) for name in plain):
        return False
    if any(getattr(a, name) != getattr(b, name) for name in (*same, "lag", "lags", "reverse")):
        return False
    if {*a.batch} != {*b.batch}:
        return False
    # Terms of one quotient have one factor in front.
    if a.normalize and not math.isclose(a.post, b.post, rel_tol=EQUAL):
        return False
    if a.decay is None or b.decay is None:
        return a.decay is b.decay
    number = math.isclose(a.decay.coefficient, b.decay.coefficient, rel_tol=EQUAL)
    return number and equal_up_to_names(a.decay, b.decay, free)
