"""Per-token bonus terms added to the causal sum (RWKV's ``u``).

    o_t = q_t (S_{t-1} + u k_t v_t)      is      sum_{s < t} ... + (sum_d q_t u k_t) v_t

RWKV-5 and RWKV-6 weigh the newest key by u. In a graph such a sum is an Add of two values. In the
body of a Scan no value is the attention alone, nor is one where the token's own weights are added
to the matrix of a mask, (W + u I) v.
"""

from __future__ import annotations

from dataclasses import replace

from linexport.match.forms.axes import Axis
from linexport.match.forms.terms import Form, Leaf, PositionOrder, Term
from linexport.match.roles.initial_state import without_initial


def split_bonus(form: Form) -> tuple[Form, tuple[Term, ...]]:
    """Return the sum over earlier tokens, and what is added to it; none of other forms.

    A state from before the first token remains with the sum.
    """
    others = tuple(t for t in form.terms if _of_one_token(t, form.axes))
    rest = replace(form, terms=tuple(t for t in form.terms if t not in others))
    sums, _ = without_initial(rest)
    if len(sums.terms) != 1 or not sums.terms[0].of(PositionOrder):
        return form, ()
    return rest, others


def _of_one_token(term: Term, free: frozenset[Axis]) -> bool:
    summed = term.axes - free
    leaves = len(term.of(Leaf)) == len(term.factors)
    return leaves and all(a.size.known is not None for a in summed)
