"""Factors of a Scan's state, one after another -> their product, the decay of the recurrence.

    (S a) m           ->   S (a m)
    Where(c, S, 0)    ->   S c

S is a state or such a product; a, m and c are of no state. Their product can leave the step as one
tensor of all tokens. Where it is 0 the state is forgotten: a reset, a gate that is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import is_read, nodes_behind
from linexport.graph.partial_eval import Values
from linexport.match.emit.layout import element_type


def join_rates(scan: gs.Node) -> bool:
    """Join the factors of every state of a Scan; returns whether there were any to join."""
    body: gs.Graph = scan.attrs["body"]
    states = body.inputs[: -scan.attrs["num_scan_inputs"]]
    rates = _Rates(body, states)
    needed = {id(node) for node in nodes_behind(body.outputs[: len(states)])}
    for node in list(body.nodes):
        rates.visit(node, id(node) in needed)
    if rates.modified:
        body.toposort()
    return rates.modified


class _Rates:
    """Factors that the states of a body are multiplied with.

    Attributes:
        modified: whether the body was changed.
    """

    def __init__(self, body: gs.Graph, states: Sequence[gs.Tensor]) -> None:
        self.body, self.modified = body, False
        self._known = Values.of_graph(body)
        self._of_states = {t.name for t in states}
        self._products: dict[str, tuple[gs.Tensor, gs.Tensor | None]] = {
            t.name: (t, None) for t in states
        }

    def visit(self, node: gs.Node, needed: bool) -> None:
        """Join the factors of a node, which the next states may need, with those before it."""
        if not any(t.name in self._of_states for t in node.inputs):
            return
        self._of_states |= {t.name for t in node.outputs}
        if not needed:
            return
        if node.op == "Where":
            self._as_product(node)
        own = [t for t in node.inputs if t.name in self._of_states]
        if node.op != "Mul" or len(own) != 1 or own[0].name not in self._products:
            return
        given, factor = own[0], next(t for t in node.inputs if t is not own[0])
        if isinstance(factor, gs.Constant) and factor.values.size == 1:
            return  # a number is followed where it is
        state, before = self._products[given.name]
        if before is not None:
            # (S a) m = S (a m): products of elements are associative, up to rounding.
            factor = self._add("Mul", f"{node.outputs[0].name}/rate", [before, factor])
            node.inputs = [state, factor]
            self._drop_unread(given)
        self._products[node.outputs[0].name] = state, factor

    def _as_product(self, node: gs.Node) -> None:
        """Write a choice between such a product and zeros as a product."""
        condition, *sides = node.inputs
        zero = [self._known.is_zero(t) for t in sides]
        if zero.count(True) != 1 or condition.name in self._of_states:
            return
        kept = sides[zero.index(False)]
        grows = kept.shape is None or node.outputs[0].shape != kept.shape
        # A condition that broadcasts S gives more elements than the state has: it is not a decay.
        if kept.name not in self._products or grows:
            return
        # Where(c, 0, S) keeps S where c is false.
        if zero[0]:
            condition = self._add("Not", f"{node.outputs[0].name}/is_kept", [condition])
        # Where(c, S, 0) = c S with c cast to 0 and 1, for finite S.
        factor = self._add("Cast", f"{node.outputs[0].name}/kept", [condition])
        factor.dtype, factor.inputs[0].attrs["to"] = kept.dtype, element_type(np.dtype(kept.dtype))
        node.op, node.inputs = "Mul", [kept, factor]

    def _add(self, op: str, name: str, inputs: list[gs.Tensor]) -> gs.Variable:
        made = gs.Variable(name, inputs[-1].dtype)
        self.body.nodes.append(gs.Node(op, name, {}, inputs, [made]))
        self.modified = True
        return made

    def _drop_unread(self, tensor: gs.Tensor) -> None:
        """Take the node out of the body that computes what nothing reads any more."""
        if tensor.inputs and not is_read(self.body, tensor):
            (node,) = tensor.inputs
            self.body.nodes[:] = [n for n in self.body.nodes if n is not node]
            node.inputs, node.outputs = [], []
