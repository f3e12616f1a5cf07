"""A step that is linear in its states, of single states and of none, as nodes of a step.

    s_t = L_t s_{t-1} + c_t        ->        L_t e for some given e, and c_t

What does not depend on the states is read where it is computed. What is zero is not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.copies import disconnect
from linexport.graph.folding import fold
from linexport.graph.operators import is_linear
from linexport.loops.step_nodes import inferred

Column: TypeAlias = "gs.Tensor | None"
"""A value for one state; None is zero."""

SUMS = ("Add", "Sub", "Sum", "Concat", "Where")
"""Operators in which inputs that are not states are addends."""


class StepColumns:
    """Copies of the nodes of a step that depend on its states.

    Args:
        body: of a Scan, its nodes in the order of evaluation.
        states: how many of its inputs and outputs are states.

    Attributes:
        nodes: what was written.
    """

    def __init__(self, body: gs.Graph, states: int) -> None:
        self.body, self.states = body, states
        self.nodes: list[gs.Node] = []
        self._made = 0

    def linear(self, given: Sequence[Column]) -> list[Column]:
        """Return L e.

        Raises:
            NoMatchError: an operator is not followed.
        """
        return self._after(given, added=False)

    def added(self) -> list[Column]:
        """Return c.

        Raises:
            NoMatchError: see ``linear``.
        """
        return self._after([None] * self.states, added=True)

    def _after(self, given: Sequence[Column], added: bool) -> list[Column]:
        own = self.body.inputs[: self.states]
        known: dict[str, Column] = {t.name: x for t, x in zip(own, given, strict=True)}
        for node in self.body.nodes:
            # A node that reads no state is the same in L e and in c, and is read where it is.
            if any(t.name in known for t in node.inputs):
                found = self._of(node, known, added)
                known |= {o.name: x for o, x in zip(node.outputs, found, strict=True)}
        after = self.body.outputs[: self.states]
        # A next state that reads no state is c alone.
        return [known.get(t.name, t if added else None) for t in after]

    def _of(self, node: gs.Node, known: Mapping[str, Column], added: bool) -> Sequence[Column]:
        """Return what a node computes where its inputs are columns."""
        taken = [t.name in known for t in node.inputs]
        if node.op in SUMS and not (node.op == "Where" and taken[0]):
            first = 1 if node.op == "Where" else 0
            # L (a + b) = L a + L b. An addend without a state is a part of c, and is zero in L e. A
            # Where by a condition without a state is linear in the values that it chooses from.
            parts = [known.get(t.name, t if added else None) for t in node.inputs[first:]]
            if all(x is None for x in parts):
                return [None]
            if node.op in ("Concat", "Where"):
                # These have no form without an operand, so that a zero is written.
                zeros = [
                    self._zeros(node, parts, i) if x is None else x for i, x in enumerate(parts)
                ]
                return self._copy(node, [*node.inputs[:first], *zeros])
            return [self._sum(node, parts)]
        # A product is linear in one factor while the other depends on no state.
        if not is_linear(node.op, taken):
            raise NoMatchError(f"{node.op} of the state is not followed")
        # Products with zero, and zeros moved, are zero.
        if known[node.inputs[taken.index(True)].name] is None:
            return [None] * len(node.outputs)
        return self._copy(node, [known.get(t.name) or t for t in node.inputs])

    def _sum(self, node: gs.Node, parts: list[Column]) -> gs.Tensor:
        """Return the sum of what is not zero; of a difference, the second is taken away."""
        left = [x for x in parts if x is not None]
        if len(left) > 1:
            return self._copy(node, left)[0]
        if node.op == "Sub" and parts[0] is None:
            return self._copy(node, left, "Neg")[0]
        return left[0]

    def _zeros(self, node: gs.Node, parts: list[Column], place: int) -> gs.Tensor:
        """Return zeros in the place of a part, of the sizes of the others."""
        dtype = node.outputs[0].dtype
        if node.op == "Where":
            return gs.Constant(self._name(f"{node.name}/zero"), np.zeros((), dtype))
        like = next(x for x in parts if x is not None)
        sizes = [list(node.inputs[i].shape or ()) for i in (place, parts.index(like))]
        if sizes[0] != sizes[1]:
            raise NoMatchError("zeros next to a part of another size are not written")
        zero = gs.Constant(self._name(f"{node.name}/zero"), np.zeros((), dtype))
        return self._copy(node, [like, zero], "Mul")[0]

    def _copy(
        self, node: gs.Node, inputs: list[gs.Tensor], op: str | None = None
    ) -> Sequence[gs.Tensor]:
        """Write a node of the same kind, or of another whose output has the shape of its input."""
        attrs = dict(node.attrs) if op is None else {}
        if node.op == "Reshape" and op is None:
            sizes = self._of_each_sequence(node)
            attrs = attrs if sizes is node.inputs[1] else {}
            inputs = [inputs[0], sizes]
        outputs = [
            gs.Variable(self._name(t.name), t.dtype or inputs[0].dtype) for t in node.outputs
        ]
        made = gs.Node(op or node.op, outputs[0].name, attrs, inputs, outputs)
        values = fold(made, self.body.opset)
        if values is not None:
            disconnect([made])
            return values
        # The batch is that of what is read, which is 1 of a state that is the same for all.
        shapes = inferred(made, {})
        for tensor, stated in zip(outputs, _as_stated(node, inputs), strict=True):
            tensor.shape = stated if shapes is None else shapes[tensor.name]
        self.nodes.append(made)
        return outputs

    def _of_each_sequence(self, node: gs.Node) -> gs.Tensor:
        """Return the shape that a Reshape gives, for any batch, where it leaves that first."""
        before, after = (list(t.shape or ()) for t in (node.inputs[0], node.outputs[0]))
        if not before or before[:1] != after[:1] or any(isinstance(n, str) for n in after[1:]):
            return node.inputs[1]
        return gs.Constant(self._name(f"{node.name}/shape"), np.asarray([0, *after[1:]], np.int64))

    def _name(self, stem: str) -> str:
        self._made += 1
        return f"{stem}/column_{self._made}"


def _as_stated(node: gs.Node, inputs: Sequence[gs.Tensor]) -> list[Any]:
    """Return the shapes that a node's outputs state, with a batch of 1 where its inputs have it."""
    wide = any(isinstance(n, str) for t in inputs for n in t.shape or ())
    return [
        t.shape and [n if wide or isinstance(n, int) else 1 for n in t.shape] for t in node.outputs
    ]
