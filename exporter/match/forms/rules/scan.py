"""Scan whose body is the recurrence of linear attention, in closed form.

    S_t = a_t S_{t-1} + U_t
    is    S_{t-1} = exp(G_{t-1}) S_0 + sum_s [s < t] exp(G_{t-1} - G_s) U_s

with G the cumulative sum of log a. The body is evaluated once, with the step as a parameter; its
outputs are then written without the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index, Renaming
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.rules.shifts import delayed_along
from linexport.match.forms.step_terms import by_states, states_in
from linexport.match.forms.terms import (
    IDENTITY,
    Factor,
    Form,
    Iota,
    Leaf,
    Nested,
    PositionOrder,
    StepValue,
    Term,
)
from linexport.match.forms.unify import collect, lagging, without_inverses


@dataclass(frozen=True)
class Steps:
    """The body of a Scan, evaluated once with the step as a parameter.

    Attributes:
        time: the parameter.
        starts: the states before all steps, by the names they have in the body.
        following: those after a step, of those before it; None where one is not followed.
        outputs: what a step gives besides.
    """

    time: Axis
    starts: dict[str, Form]
    following: dict[str, Form | None]
    outputs: list[Form | None]


@rule("Scan")
def scan(e: Evaluator, node: gs.Node) -> dict[str, Form] | None:
    """Forms of the stacked outputs; the last states stay opaque."""
    steps = read_steps(e, node)
    if steps is None:
        return None
    named = {} if e.names is None else e.names.of_states(node)
    kept = {name: f for name, f in steps.following.items() if name not in named}
    before = _before(e, kept, steps.starts, steps.time)
    if before is None:
        return None
    states = len(steps.starts)
    axes = node.attrs.get("scan_output_axes") or [0] * len(steps.outputs)
    found: dict[str, Form] = {}
    for given, outer, axis in zip(steps.outputs, node.outputs[states:], axes, strict=True):
        form = None if given is None else _without_states(given, before)
        if form is None:
            continue
        place = axis % (len(form.dims) + 1)
        # Outputs of all steps are stacked: the parameter becomes a dim.
        row: Index = (Axis(steps.time.size),)
        stacked = form.rename({steps.time: row})
        dims = (*stacked.dims[:place], row, *stacked.dims[place:])
        found[outer.name] = collect(Form(dims, stacked.terms))
    return found


def read_steps(e: Evaluator, node: gs.Node) -> Steps | None:
    """Return the body of a Scan as forms; None where it has directions, or is not followed."""
    body, count = node.attrs["body"], node.attrs["num_scan_inputs"]
    states = len(node.inputs) - count
    steps = steps_of(e, node, states, count)
    starts = e.forms(node.inputs[:states])
    if steps is None or starts is None:
        return None
    time, given = steps
    bound = dict(zip((t.name for t in body.inputs[states:]), given, strict=True))
    named = {} if e.names is None else e.names.of_states(node)
    for tensor, start in zip(body.inputs[:states], starts, strict=True):
        # The state before the step is a leaf; the step is one more label of it, as it changes.
        kind = StepValue if tensor.name in named else Leaf
        own = kind(named.get(tensor.name, tensor), (*start.dims, (time,)))
        bound[tensor.name] = replace(start, terms=(Term(1.0, (own,)),))
    step = None if e.names is None else time
    inside = Evaluator(body, bound, outer=e, names=e.names, step=step, named=named)
    made = {o.name for n in body.nodes for o in n.outputs}
    forms = [followed(inside.form(after), made) for after in body.outputs]
    names = [t.name for t in body.inputs[:states]]
    return Steps(
        time,
        dict(zip(names, starts, strict=True)),
        dict(zip(names, forms[:states], strict=True)),
        forms[states:],
    )


def _before(
    e: Evaluator, following: dict[str, Form | None], first: dict[str, Form], time: Axis
) -> dict[str, Form] | None:
    """Return states before a step, from their forms after it; None where one is not followed.

    ``first`` are those before all steps.
    """
    before: dict[str, Form] = {}
    # A state that does not read itself is a function of the others one step before.
    ordered = sorted(following.items(), key=lambda state: not states_in(state[1], {state[0]}))
    for name, form in ordered:
        if states_in(form, {name}):
            closed = form and _closed(e, form, name, first[name], time)
        elif (same := _step_ago(e, form, first[name])) is not None:
            closed = same
        # The value of the step before is zero in the first step: the state must begin so.
        elif first[name].scalar != 0:
            closed = None
        else:
            closed = form and _without_states(form, before)
            closed = closed and delayed_along(closed, (time,))
        # A closed form that still reads a state would need that one solved first.
        if closed is None or states_in(closed, following):
            return None
        before[name] = closed
    return before


def _step_ago(e: Evaluator, form: Form | None, first: Form) -> Form | None:
    """Return what a named state was before the step after which it is this form, if it is that.

    Args:
        e: of the graph.
        form: a value after a step.
        first: what the value begins with.
    """
    leaf = None if form is None else form.leaf
    if form is None or e.names is None or not isinstance(leaf, StepValue):
        return None
    found = e.names.before(leaf.tensor.name)
    if found is None or form.terms[0].coefficient != 1 or leaf.function != IDENTITY:
        return None
    begun = e.form(found[1])
    if begun is None or begun.scalar is None or begun.scalar != first.scalar:
        return None
    return replace(form, terms=(Term(1.0, (replace(leaf, tensor=found[0]),)),))


def steps_of(
    e: Evaluator, node: gs.Node, states: int, count: int
) -> tuple[Axis, list[Form]] | None:
    """Return the parameter that counts steps, and the scanned inputs at that step.

    None where steps are taken backwards, or an input is not followed.
    """
    if any(any(node.attrs.get(f"scan_{side}_directions") or ()) for side in ("input", "output")):
        return None
    forms = e.forms(node.inputs[states:])
    if forms is None:
        return None
    axes = node.attrs.get("scan_input_axes") or [0] * count
    places = [a % len(f.dims) for a, f in zip(axes, forms, strict=True)]
    lengths = [f.dims[p] for f, p in zip(forms, places, strict=True)]
    if any(len(index) != 1 for index in lengths):
        return None
    time = Axis(lengths[0][0].size, parameter=True)
    given = []
    for form, place in zip(forms, places, strict=True):
        # A step reads one slice: the scanned dim goes, and its label becomes the step.
        at_step = form.rename({form.dims[place][0]: (time,)})
        given.append(Form(at_step.dims[:place] + at_step.dims[place + 1 :], at_step.terms))
    return time, given


def followed(form: Form | None, made: set[str]) -> Form | None:
    """Return a form, unless it has a value of the body that the rules do not follow.

    Such a value may depend on the step and on the states.
    """
    terms = [] if form is None else list(form.terms)
    for term in terms:
        terms += [t for f in term.of(Nested) for t in f.inner.terms]
        leaves = (f for f in term.of(Leaf) if not isinstance(f, StepValue))
        if any(f.tensor.name in made for f in leaves):
            return None
    return form


def _closed(e: Evaluator, form: Form, state: str, first: Form, time: Axis) -> Form | None:
    """The state before a step, from the form of the state after it and that before all steps."""
    # S_t = a S_{t-1} + U: a term with the state, and terms without. Of two terms with the state
    # the rate would be a sum, whose logarithm is not a sum of logarithms. The state must come back
    # entry by entry; a product with a matrix is another recurrence.
    terms = by_states(form, {state})
    if terms is None or terms.moved or len(terms.kept) != 1 or not terms.added:
        return None
    (rate,) = terms.kept
    # The state is S_0, and the sum of what earlier steps added: sum_s [s < t] U_s.
    column: Index = (Axis(time.size),)
    order = Term(1.0, (PositionOrder((time,), column, -1),))
    earlier = replace(form, terms=terms.added).rename({time: column})
    products = [algebra.multiplied(t, order) for t in earlier.terms]
    closed = Form(form.dims, tuple(t for t in products if t is not None))
    growth = logarithm_of(e, rate)
    if growth is None:
        return None
    begun = () if first.scalar == 0 else first.rename(_labels(first, form)).terms
    # A rate of 1: nothing that was added decays.
    if not growth:
        return replace(closed, terms=(*closed.terms, *begun))
    growth, ends = (growth, []) if e.names is None else e.names.telescoped(growth)
    if ends and first.scalar != 0:
        return None
    free = frozenset(closed.axes | {*column, time})
    for before, after in ends:
        # The product of exp(m_u - m_{u+1}) from s + 1 to t - 1 is exp(m_{s+1} - m_t).
        for term in (after.rename({time: column}).scaled(-1.0), before.scaled(-1.0)):
            closed = replace(closed, terms=_times_exp(closed.terms, term, free))
    # What step s added has met the rates of the steps s + 1 to t - 1, whose product is
    # exp(G_{t-1} - G_s), as exp(G_t) exp(-g_t) exp(-G_s): exp of a sum is a product of exps.
    for exponent in growth:
        summed = _accumulated(exponent, time)
        at_column = summed.rename({time: column}).scaled(-1.0)
        free = frozenset(closed.axes | {*column, time})
        # S_0 has met all rates before this step.
        for term in (summed, exponent.scaled(-1.0)):
            begun = _times_exp(begun, term, free)
        for term in (summed, exponent.scaled(-1.0), at_column):
            closed = replace(closed, terms=_times_exp(closed.terms, term, free))
    return replace(closed, terms=(*closed.terms, *begun))


def _labels(form: Form, other: Form) -> Renaming:
    """Return the labels that the dims of another form have for those of this one."""
    pairs = zip(form.dims, other.dims, strict=True)
    return {a: (b,) for x, y in pairs for a, b in zip(x, y, strict=True)}


def _times_exp(terms: Sequence[Term], exponent: Term, free: frozenset[Axis]) -> tuple[Term, ...]:
    """Return terms times exp of a term."""
    if exponent.factors:
        grown = Term(1.0, (algebra.exponent(exponent, free),))
    else:
        grown = Term(math.exp(exponent.coefficient))
    products = [algebra.multiplied(t, grown) for t in terms]
    return tuple(without_inverses(t) for t in products if t is not None)


def logarithm_of(e: Evaluator, rate: Term) -> list[Term] | None:
    """Return the terms of the logarithm of a product; None where it cannot be taken.

    A factor may be negative: the logarithm is of |x|, the sign a factor, see ``signed_decay``.
    """
    own = rate.factors[0] if len(rate.factors) == 1 else None
    if isinstance(own, Leaf) and rate.coefficient != 1:
        scaled = ("Mul", (), own.function, ("const", rate.coefficient, None))
        rate = Term(1.0, (replace(own, function=scaled),))
    # log(a b) = log a + log b.
    if rate.coefficient <= 0:
        return None
    terms = [Term(math.log(rate.coefficient))] if rate.coefficient != 1 else []
    for factor in rate.factors:
        if isinstance(factor, Leaf):
            terms += _of_sums(e, factor) or [Term(1.0, (factor.logarithm,))]
        elif isinstance(factor, Nested) and factor.kind == "exp":
            terms += factor.inner.terms
        else:
            return None
    return terms


def _of_sums(e: Evaluator, rate: Leaf) -> list[Term]:
    """Return the terms of the sum whose exp a tensor is, such as a chunk's decays; none of others.

    In front of a loop such an exp may be a feature map, and is opaque. As a rate it is a decay.
    """
    node = producer(rate.tensor, "Exp")
    form = e.form(node.inputs[0]) if node is not None and rate.function == IDENTITY else None
    if form is None or not any(t.axes - form.axes for t in form.terms):
        return []
    found = dict[Axis, Index]()
    for own, index in zip(form.dims, rate.dims, strict=True):
        if len(own) != len(index):
            return []
        found.update({a: (b,) for a, b in zip(own, index, strict=True)})
    return list(form.rename(found).terms)


def _accumulated(exponent: Term, time: Axis) -> Term:
    """Return the cumulative sum over steps; of a number, a multiple."""
    if not exponent.factors:
        return Term(exponent.coefficient, (Iota((time,)),))
    column: Index = (Axis(time.size),)
    moved = exponent.rename({time: column})
    return Term(moved.coefficient, (*moved.factors, PositionOrder((time,), column)))


def _without_states(form: Form, before: dict[str, Form]) -> Form | None:
    """Return a form with closed forms in place of states; None where a term has two of them."""
    result = algebra.constant(0.0, form.dims)
    for given in form.terms:
        term = _inside_states(given, before)
        if term is None:
            return None
        states = [f for f in term.of(Leaf) if f.tensor.name in before]
        if len(states) > 1:
            return None
        if not states:
            result = collect(Form(form.dims, (*result.terms, term)))
            continue
        state = states[0]
        # What the closed form sums over gets labels of its own; its dims become the state's.
        closed = before[state.tensor.name].fresh()
        renaming = {}
        for own, index in zip(closed.dims, state.dims[:-1], strict=True):
            if len(own) != len(index) or state.function != ("x",):
                return None
            renaming.update({a: (b,) for a, b in zip(own, index, strict=True)})
        inside = closed.rename(renaming)
        rest: tuple[Factor, ...] = tuple(f for f in term.factors if f is not state)
        # A factor times a sum is the sum of the products.
        products = [algebra.multiplied(Term(term.coefficient, rest), t) for t in inside.terms]
        simpler = (lagging(without_inverses(p)) for p in products if p is not None)
        joined = (*result.terms, *simpler)
        result = collect(Form(form.dims, joined))
    return result


def _inside_states(term: Term, before: dict[str, Form]) -> Term | None:
    """Replace states within nested factors."""
    factors: list[Factor] = []
    for factor in term.factors:
        if isinstance(factor, Nested):
            inner = _without_states(factor.inner, before)
            if inner is None:
                return None
            factor = replace(factor, inner=inner)
        factors.append(factor)
    return Term(term.coefficient, tuple(factors))
