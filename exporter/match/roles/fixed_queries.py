"""A causal convolution with a sum of exponentials, as roles: its queries are stored numbers.

    sum_{s,n} [s <= t] c_n exp(a_n (t - s)) u_s    is    h_t = exp(a) h_{t-1} + u_t,  y_t = c . h_t

linear attention whose query is c at every token, whose keys are 1, and whose channels n decay by
exp(a_n): the diagonal state space of S4D (Gu et al. 2022, arXiv 2206.11893) with real rates, and
MEGA's moving average (Ma et al. 2022, arXiv 2209.10655). With complex rates a + ib

    sum_{s,n} [s <= t] exp(a_n (t - s)) (c_n cos b_n (t - s) - d_n sin b_n (t - s)) u_s

is the real part of the same, with c + id in the place of c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.terms import TURNS, Form, Leaf, Nested, PositionOrder, Term
from linexport.match.forms.unify import match
from linexport.match.roles.decay import common_exponent, common_multiple
from linexport.match.roles.labels import Labelled, Positions, axes_of, batch_and_widths, ordered
from linexport.match.roles.roles import Roles, Turn

IsWeight = Callable[[gs.Tensor], bool]


def read_fixed_queries(product: Term, form: Form, is_weight: IsWeight) -> Roles | None:
    """Return the roles of such a convolution; None where it is something else.

    Its channels may turn: the roles then have no query, but a turn with one product in it.

    Raises:
        NotAttentionError: its decay is not that of a recurrence.
    """
    positions, turns = _positions(product, form), _turns(product)
    if positions is None:
        return None
    channels = product.axes - form.axes - {*positions.key}
    found = Labelled.of(product.of(Leaf), positions.query, positions.key, channels)
    if not (channels or turns) or not _separates(found, is_weight):
        return None
    decay = common_exponent(product, positions.query, positions.key)
    assert decay is not None
    rates, angle = decay.of(Leaf), None
    if turns:
        # The angle must be b t - b s: a rotation by b in every step, of which t - s make b (t - s).
        angle = common_multiple(turns[0].inner.terms, product, positions.query, positions.key)
        if angle is None:
            return None
        rates += angle.of(Leaf)
    own = axes_of((*found.neither, *rates)) - channels
    # A head is what has numbers of its own; it must be one that the value has.
    of_value = own <= {*positions.query} | (axes_of(found.s) - {*positions.key})
    if not of_value or not all(is_weight(f.tensor) for f in rates):
        return None
    batch, widths = batch_and_widths(found.s, positions.key, own)
    roles = Roles(
        query=found.neither,
        key=(),
        value=found.s,
        weights=found.t,
        mask=None,
        decay=decay,
        query_position=positions.query,
        key_position=positions.key,
        channels=ordered((*found.neither, *rates), channels),
        widths=widths,
        batch=batch,
        causal=True,
    )
    if angle is None:
        return roles
    weighed = {"cos": (), "sin": ()} | {turns[0].kind: (Term(product.coefficient, found.neither),)}
    return replace(roles, query=(), turn=Turn(angle, weighed["cos"], weighed["sin"]))


def _positions(product: Term, form: Form) -> Positions | None:
    """Return the positions of a product with a decay from each token on, and one turn at most."""
    orders, turns = product.of(PositionOrder), _turns(product)
    exps = [f for f in product.of(Nested) if f.kind == "exp"]
    known = (*orders, *product.of(Leaf), *exps, *turns)
    if len(orders) != 1 or not exps or len(turns) > 1 or len(known) != len(product.factors):
        return None
    found = Positions.of(orders[0], form.axes, product.axes - form.axes)
    return None if found is None or found.reverse or found.offset else found


def _separates(found: Labelled, is_weight: IsWeight) -> bool:
    """Return whether no factor joins positions and channels, and the stored ones are of neither."""
    if found.both or found.s_channels or found.t_channels or not found.s:
        return False
    stored = all(is_weight(f.tensor) for f in found.neither)
    return stored and not any(is_weight(f.tensor) for f in found.s)


def read_turning_queries(form: Form, is_weight: IsWeight) -> Roles | None:
    """Return the roles of a sum of such convolutions, in whose kernels channels turn alike.

    Raises:
        NotAttentionError: see ``read_fixed_queries``.
    """
    first, *others = form.terms
    roles = read_fixed_queries(first, form, is_weight)
    if roles is None or roles.turn is None:
        return None
    whole = roles.turn
    for term in others:
        other = read_fixed_queries(term, form, is_weight)
        if other is None or other.turn is None or _keys(other) != _keys(roles):
            return None
        names = match(_unweighed(first, roles), _unweighed(term, other), form.axes)
        if names is None:
            raise NotAttentionError(
                "its kernel is a sum of cosines and sines of several angles or decays, where one "
                "of each is expected for every channel of its state"
            )
        if {*other.channels} - {*names.values()}:
            return None
        back: dict[Axis, Index] = {there: (here,) for here, there in names.items()}
        cosines, sines = (
            tuple(x.rename(back) for x in found) for found in (other.turn.cosines, other.turn.sines)
        )
        whole = replace(whole, cosines=whole.cosines + cosines, sines=whole.sines + sines)
    return replace(roles, turn=whole)


def _keys(roles: Roles) -> list[str]:
    """Return what is convolved, up to labels: sums over different tokens are no single one."""
    return sorted(repr(f.key()) for f in (*roles.value, *roles.weights))


def _turns(product: Term) -> list[Nested]:
    return [f for f in product.of(Nested) if f.kind in TURNS]


def _unweighed(product: Term, roles: Roles) -> Term:
    """Return a product without its stored factors, and with a cosine in the place of a sine."""
    assert roles.turn is not None
    stored = {id(f) for x in (*roles.turn.cosines, *roles.turn.sines) for f in x.factors}
    (turn,) = _turns(product)
    rest = [f for f in product.factors if f is not turn and id(f) not in stored]
    return Term(1.0, (*rest, replace(turn, kind="cos")))
