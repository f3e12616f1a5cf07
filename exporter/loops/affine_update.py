"""Sums, choices and factors that a Scan's step makes of its state -> one decay of it, and one sum.

    S + z (v - S)           ->   (1 - z) S + z v       moving averages, ``torch.lerp``
    S - a S + b             ->   (1 - a) S + b
    a (S + b)               ->   a S + a b
    Where(c, 0, a S + b)    ->   Where(c, 0, a) S + Where(c, 0, b)
    a S + b + c             ->   a S + (b + c)                  but for outer products, k v^T
    (S a) m                 ->   S (a m)                        in any step

z, v, a, b, c and m are of no state. The product of factors can leave the step as one tensor of all
tokens. Where it is 0 the state is forgotten: a reset, a gate that is closed. What mixes entries of
the state, such as a delta rule, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs

from linexport.graph.copies import disconnect
from linexport.graph.edit import nodes_behind, original_of, producer
from linexport.graph.operators import COPIES, ELEMENTWISE, LAYOUT, PRODUCTS
from linexport.loops.step_algebra import StepAlgebra, Terms
from linexport.loops.step_nodes import broadcast, numbers_in

PASS_ON = COPIES | LAYOUT | {"Neg"}
"""Operators that an outer product remains one behind."""

ONE: Terms = ((1.0, None),)


def join_updates(scan: gs.Node) -> bool:
    """Write every next state with one decay; returns whether there was one to write."""
    body: gs.Graph = scan.attrs["body"]
    states = body.inputs[: -scan.attrs["num_scan_inputs"]]
    _write_shapes(body)
    rules = (_join_sums, _join_factors)
    # Every state is looked at, whatever became of those before it.
    return True in [
        _joined(body, states, place, rule) for rule in rules for place in range(len(states))
    ]


def _joined(
    body: gs.Graph,
    states: Sequence[gs.Tensor],
    place: int,
    rule: Callable[[StepAlgebra, int], bool],
) -> bool:
    step = StepAlgebra(body, states, alike=states[place])
    modified = rule(step, place)
    if modified:
        body.nodes += step.nodes
        body.cleanup().toposort()
    else:
        disconnect(step.nodes)
    return modified


def _join_sums(step: StepAlgebra, place: int) -> bool:
    """Write r S + b for the next state."""
    body, state = step.body, step.body.inputs[place]
    after = original_of(body.outputs[place])
    if step.states_of(after) != {place} or _is_joined(step, after):
        return False
    rate, added = (
        step.followed([after], {state.name: given}, added).get(after.name)
        for given, added in ((ONE, False), ((), True))
    )
    if rate is None or added is None:
        return False
    made = step.affine(rate, state, added)
    for node in list(after.outputs):
        node.inputs = [made if t is after else t for t in node.inputs]
    body.outputs = [made if t is after else t for t in body.outputs]
    return True


def _is_joined(step: StepAlgebra, after: gs.Tensor) -> bool:
    """Return whether a value is factors times the state, with one addend, as it is written."""
    tensor, added, factors = after, list[gs.Tensor](), False
    while (node := producer(tensor)) is not None:
        own = [t for t in node.inputs if step.states_of(t)]
        if len(own) != 1 or node.op == "Where" or (factors and node.op in ("Add", "Sub")):
            return False
        factors = factors or node.op == "Mul"
        added += [t for t in node.inputs if t is not own[0] and node.op in ("Add", "Sub")]
        (tensor,) = own
    # a S + b + c = a S + (b + c): the sum of two terms of tokens can leave the loop. A sum of outer
    # products cannot, as it would be kept for all tokens.
    return len(added) < 2 or any(_is_outer(t, after) for t in added)


def _is_outer(tensor: gs.Tensor, state: gs.Tensor) -> bool:
    """Return whether a value is an outer product, or one of those times something."""
    node = producer(tensor)
    if node is None or node.op not in PRODUCTS | PASS_ON:
        return False
    if node.op in PASS_ON:
        return _is_outer(node.inputs[0], state)
    whole = [t for t in node.inputs if t.shape is not None]
    whole = [t for t in whole if numbers_in([t]) == numbers_in([state])]
    return not whole or any(_is_outer(t, state) for t in whole)


def _join_factors(step: StepAlgebra, place: int) -> bool:
    """Multiply the state once, where next states need it times several factors."""
    body, state = step.body, step.body.inputs[place]
    after, modified = body.outputs[: step.count], False
    rates, added = (
        step.followed(after, {state.name: given}, added)
        for given, added in ((ONE, False), ((), True))
    )
    for node in nodes_behind(after):
        own = [t for t in node.inputs if step.states_of(t)]
        others = [t for t in node.inputs if not step.states_of(t)]
        name = node.outputs[0].name
        factors = rates.get(name, ())
        if node.op not in ("Mul", "Where") or len(factors) != 1 or added.get(name) != ():
            continue
        # A state times one factor is as it should be, and a number is followed where it is.
        if node.op == "Mul" and (own[0] is state or _is_number(others[0])):
            continue
        ((sign, factor),) = factors
        if sign > 0 and factor is not None:
            # (S a) m = S (a m): products of entries are associative, up to rounding.
            node.op, node.inputs, modified = "Mul", [state, factor], True
    return modified


def _is_number(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and tensor.values.size == 1


def _write_shapes(body: gs.Graph) -> None:
    """Write the shapes of what is computed entry by entry.

    torch's functions of several operators say none of those inside.
    """
    for node in body.nodes:
        if node.op in ELEMENTWISE and node.outputs[0].shape is None:
            shapes = (None if t.shape is None else list(t.shape) for t in node.inputs)
            node.outputs[0].shape = broadcast(shapes)
