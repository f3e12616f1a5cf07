"""How a value of a loop's step depends on the states before it: its terms, by what they read.

a S + b (c^T S) + u        kept: a        moved: b c, with the leaf of S that c is summed with
                           added: u
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from linexport.match.forms.terms import IDENTITY, Form, Leaf, Term


@dataclass(frozen=True)
class StepTerms:
    """The terms of a form that is linear in states.

    Attributes:
        kept: what entries of a state are multiplied with, where the form has them in their places.
        moved: the same of other entries, such as those of a row, with the leaf that reads them.
        added: terms without a state.
    """

    kept: tuple[Term, ...]
    moved: tuple[tuple[Term, Leaf], ...]
    added: tuple[Term, ...]


def by_states(form: Form | None, states: Collection[str]) -> StepTerms | None:
    """Split a form by the states that its terms read.

    Args:
        form: of a value of a step. The step may be one more label of a state, as it changes.
        states: names of leaves.

    Returns:
        The terms; None without a form, or of one that is not linear in the states.
    """
    if form is None:
        return None
    kept, moved, added = list[Term](), list[tuple[Term, Leaf]](), list[Term]()
    for term in form.terms:
        own = [f for f in term.of(Leaf) if f.tensor.name in states]
        # One state in a term, under no function.
        if len(own) > 1 or any(f.function != IDENTITY for f in own):
            return None
        rest = Term(term.coefficient, tuple(f for f in term.factors if f not in own))
        if not own:
            added.append(term)
        elif tuple(i for i in own[0].dims if not any(a.parameter for a in i)) == form.dims:
            kept.append(rest)
        else:
            moved.append((rest, own[0]))
    return StepTerms(tuple(kept), tuple(moved), tuple(added))


def states_in(form: Form | None, states: Collection[str]) -> set[str]:
    """Return the states that are factors of a form."""
    terms = () if form is None else form.terms
    return {f.tensor.name for term in terms for f in term.of(Leaf)}.intersection(states)
