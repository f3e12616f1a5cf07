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


def split_bonus(form: Form) -> tuple[Form, tuple[Term, ...]]:
    """Return the sum over earlier tokens alone, and what is added to it; none of other forms."""
    sums = tuple(t for t in form.terms if t.of(PositionOrder))
    others = tuple(t for t in form.terms if not t.of(PositionOrder))
    if len(sums) != 1 or not all(_of_one_token(t, form.axes) for t in others):
        return form, ()
    return replace(form, terms=sums), others


def _of_one_token(term: Term, free: frozenset[Axis]) -> bool:
    summed = term.axes - free
    leaves = len(term.of(Leaf)) == len(term.factors)
    return leaves and all(a.size.known is not None for a in summed)
