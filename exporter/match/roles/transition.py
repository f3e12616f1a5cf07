"""A Scan over tokens whose state fades and is corrected along one direction, as roles.

    S_t = diag(alpha_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
    o_t = q_t^T S_t,  or  q_t^T S_{t-1}

The body is evaluated once, with the step as a parameter. Of the next state, the term that has the
state entry by entry says how it fades, the one with a vector that reads the state is the
correction, and the one without it is what is written. S may be stored transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import original_of
from linexport.match.forms.axes import Axis, Index, Renaming
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.rules.scan import followed, logarithm_of, steps_of
from linexport.match.forms.step_terms import by_states
from linexport.match.forms.terms import Form, Iota, Leaf, PositionOrder, Term
from linexport.match.roles.roles import Roles, Transition


@dataclass(frozen=True)
class _Parts:
    """The next state, split into decay, correction and addend.

    Attributes:
        dims: labels of the state.
        channel: the one of them that vectors read along.
        rate: what the state is multiplied with.
        correction, reads, writes: the coefficient and the leaves of b and a.
        written, key, value: those of k v^T.
    """

    dims: Index
    channel: Axis
    rate: Term
    correction: float
    reads: tuple[Leaf, ...]
    writes: tuple[Leaf, ...]
    written: float
    key: tuple[Leaf, ...]
    value: tuple[Leaf, ...]


def read_transition(e: Evaluator, node: gs.Node) -> tuple[Roles, Form] | None:
    """Return the roles of the only output of all steps, and its form; None of another loop.

    The state behind the last step may be read as well: it is a state of the fused node.
    """
    count = node.attrs.get("num_scan_inputs", 0)
    single = len(node.inputs) == count + 1 and len(node.outputs) == 2
    if node.op != "Scan" or not single:
        return None
    body, start, steps = node.attrs["body"], e.form(node.inputs[0]), steps_of(e, node, 1, count)
    if steps is None or start is None or start.scalar != 0:
        return None
    time, given = steps
    before, after = body.inputs[0], original_of(body.outputs[0])
    bound = dict(zip((t.name for t in body.inputs[1:]), given, strict=True))
    bound[before.name] = replace(start, terms=(Term(1.0, (Leaf(before, start.dims),)),))
    inside = Evaluator(body, bound, outer=e, ends={after.name})
    made = {o.name for n in body.nodes for o in n.outputs} - {after.name}
    following = followed(inside.inside.get(after.name), made)
    output = followed(inside.form(body.outputs[1]), made)
    parts = following and _parts(following, before.name)
    if not output or not parts:
        return None
    last = _query(output, after.name, parts)
    read = last or _query(output, before.name, parts)
    roles = read and _roles(e, parts, read[0], time)
    if not roles or not read:
        return None
    roles = replace(roles, lag=int(last is None))
    place = (node.attrs.get("scan_output_axes") or [0])[0] % (len(read[1]) + 1)
    dims = (*read[1][:place], roles.query_position, *read[1][place:])
    return roles, Form(dims, (Term(1.0, (Leaf(node.outputs[1], dims),)),))


def _parts(form: Form, state: str) -> _Parts | None:
    """Return the parts of the next state; None where it is another sum."""
    terms = by_states(form, {state})
    if terms is None or any(len(index) > 1 for index in form.dims):
        return None
    if not len(terms.kept) == len(terms.moved) == len(terms.added) == 1:
        return None
    (kept,), ((correction, own_leaf),), (addend,) = terms.kept, terms.moved, terms.added
    renamed = [(x, y) for x, y in zip(own_leaf.dims, form.dims, strict=True) if x != y]
    if len(renamed) != 1 or not all(renamed[0]) or correction.axes - form.axes - {*renamed[0][0]}:
        return None
    ((bound,), (channel,)) = renamed[0]
    reads, writes = _split(correction, bound)
    key, value = _split(addend, channel)
    # b_j a_i S_ij is summed over the channel that a reads; nothing else may be summed in a step.
    mixed = any(channel in f.axes for f in reads) or addend.axes - form.axes or bound in form.axes
    leaves = len(correction.of(Leaf) + addend.of(Leaf))
    if mixed or leaves != len(correction.factors) + len(addend.factors) or not reads or not key:
        return None
    return _Parts(
        tuple(a for index in form.dims for a in index),
        channel,
        kept,
        correction.coefficient,
        tuple(f.rename({bound: (channel,)}) for f in reads),
        writes,
        addend.coefficient,
        key,
        value,
    )


def _split(term: Term, axis: Axis) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Return the leaves that depend on a label, and the others."""
    leaves: Sequence[Leaf] = term.of(Leaf)
    with_axis = tuple(f for f in leaves if axis in f.axes)
    return with_axis, tuple(f for f in leaves if axis not in f.axes)


def _query(output: Form, state: str, parts: _Parts) -> tuple[Term, tuple[Index, ...]] | None:
    """Return the product that reads the state, and the dims of the output by the state's labels."""
    terms = by_states(output, {state})
    if len(output.terms) != 1 or terms is None or not terms.moved:
        return None
    ((query, own),) = terms.moved
    if len(query.of(Leaf)) < len(query.factors):
        return None
    labels = [a for index in own.dims for a in index]
    if len(labels) != len(parts.dims):
        return None
    known: Renaming = {a: (b,) for a, b in zip(labels, parts.dims, strict=True)}
    summed = Term(1.0, (own,)).rename(known).axes - output.rename(known).axes
    # A query reads the state along the channel that keys were written to.
    if summed != {parts.channel} or query.axes - output.axes - {*labels}:
        return None
    return query.rename(known), output.rename(known).dims


def _roles(e: Evaluator, parts: _Parts, query: Term, time: Axis) -> Roles | None:
    """Return the roles; None where heads, channels and widths are ambiguous."""
    growth = logarithm_of(e, parts.rate)
    if growth is None or len(growth) > 1 or any(len(t.of(Leaf)) < len(t.factors) for t in growth):
        return None
    vectors = (*parts.key, *parts.reads, *parts.writes, *query.of(Leaf))
    shared = {a for f in (*vectors, *(f for t in growth for f in t.of(Leaf))) for a in f.axes}
    batch = tuple(a for a in parts.dims if a.size.known is None)
    heads = tuple(a for a in parts.dims if a in shared and a not in (*batch, parts.channel))
    widths = tuple(a for a in parts.dims if a not in (*batch, *heads, parts.channel))
    if not widths or any({*widths} & f.axes for f in vectors):
        return None
    t, s, u = (Axis(time.size) for _ in range(3))

    def at(leaves: Sequence[Leaf], position: Axis) -> tuple[Leaf, ...]:
        return tuple(f.rename({time: (position,)}) for f in leaves)

    return Roles(
        query=at(query.of(Leaf), t),
        key=at(parts.key, s),
        value=at(parts.value, s),
        weights=(),
        mask=None,
        decay=_decay(growth[0], time, t, u) if growth else None,
        query_position=(t,),
        key_position=(s,),
        channels=(parts.channel,),
        widths=widths,
        batch=batch,
        causal=True,
        post=parts.written * query.coefficient,
        transition=Transition(heads, at(parts.reads, s), at(parts.writes, s), parts.correction),
    )


def _decay(growth: Term, time: Axis, t: Axis, u: Axis) -> Term:
    """Return the sum of the logarithms of all rates up to a query."""
    if time not in growth.axes:
        return replace(growth, factors=(*growth.factors, Iota((t,))))
    # log of a product of rates is the sum of their logarithms.
    summed = growth.rename({time: (u,)})
    return replace(summed, factors=(*summed.factors, PositionOrder((t,), (u,))))
