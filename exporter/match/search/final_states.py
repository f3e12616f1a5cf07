"""States behind the last token, given by the fused node instead of being computed once more.

    y = LinearAttention(q, k, v),  S = sum_s exp(G_T - G_s) k_s v_s
    ->    y, S = LinearAttention(q, k, v)

A loop gives such a state as its last one, and a listing in chunks as that of the last chunk. A
value without a dim of tokens is tried in each order of dims that its shape allows; one that equals
a state of the node is proven as every other match is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import detach, is_output, nodes_behind
from linexport.graph.monomials import Size
from linexport.graph.op_nodes import state_type, view_of
from linexport.graph.run_subgraph import symbols_in
from linexport.match.emit.candidate import inputs_of
from linexport.match.emit.layout import Nodes, written_size
from linexport.match.emit.tokens import Undelayed
from linexport.match.forms.axes import Index, fresh, size_of
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Leaf
from linexport.match.proof.prove import ProofFailedError, RewriteCandidate, prove
from linexport.match.roles.roles import Roles
from linexport.match.search.state_layouts import orders
from linexport.match.search.stateful_region import depends
from linexport.plugins.ops.op import Op, StatePort
from linexport.plugins.ops.registry import all_ops

log = logging.getLogger(__name__)

STATE = "state"
"""Name of the state of keys and values, (B, heads, keys, values)."""

MAX_TRIED = 24
"""Values of a state's size, each in its orders of dims, that are tried for one node."""


@dataclass(frozen=True)
class FinalState:
    """How a state of a fused node becomes a value of the graph, in other dims.

    Attributes:
        nodes: what computes the value from the state.
        result: the last of what they compute.
        candidate: the rewrite that was proven.
    """

    nodes: tuple[gs.Node, ...]
    result: gs.Tensor
    candidate: RewriteCandidate


class FinalStates:
    """The final states that one fused node computes.

    Args:
        graph: with the fused node in place.
        evaluator: of the graph before that.
        roles: of the match.
        fused: the fused node.
        proven: the rewrite by which it is there, whose draws of inputs are used again.
        undelayed: what the last token still has to write to the node's state, if it has.
    """

    def __init__(
        self,
        graph: gs.Graph,
        evaluator: Evaluator,
        roles: Roles,
        fused: gs.Node,
        proven: RewriteCandidate,
        undelayed: Undelayed | None,
    ) -> None:
        self.undelayed = undelayed
        self.graph, self.evaluator, self.roles = graph, evaluator, roles
        self.fused, self.proven = fused, proven
        self._tried = 0

    def values(self) -> Iterator[gs.Variable]:
        """Yield values without a dim of tokens that are computed of keys, the last ones first.

        What is then computed of a state already is left out.
        """
        for node in reversed(self._computed_of_keys()):
            for tensor in node.outputs:
                if self._tried == MAX_TRIED:
                    return
                if self._is_behind_tokens(tensor) and self._is_read(tensor):
                    yield tensor

    def _computed_of_keys(self) -> list[gs.Node]:
        """Return the nodes that compute what depends on keys otherwise than by the match."""
        known = {leaf.tensor.name for leaf in (*self.roles.key, *self.roles.value)}
        found = list[gs.Node]()
        for node in self.graph.nodes:
            if depends(node, known):
                made = [t for t in node.outputs if t is not self.proven.original[1]]
                known |= {t.name for t in made if not t.is_empty()}
                found.append(node)
        return found

    def _is_read(self, tensor: gs.Tensor) -> bool:
        """Return whether an output of the graph is computed of a value."""
        live = {id(node) for node in nodes_behind(self.graph.outputs)}
        return is_output(self.graph, tensor) or any(id(node) in live for node in tensor.outputs)

    def _is_behind_tokens(self, tensor: gs.Tensor) -> bool:
        """Return whether a value has the dims of a state, and is none that begins with zeros."""
        sizes = None if tensor.is_empty() else self.evaluator.sizes(tensor)
        if not sizes or len(sizes) < 2 or self.evaluator.values.is_zero(tensor):
            return False
        tokens = symbols_in(self.proven.length)
        return not any(symbols_in(size) & tokens for size in sizes)

    def find(self, tensor: gs.Variable, region: Sequence[gs.Node]) -> FinalState | None:
        """Return how a state of the node becomes a value, None where none does.

        Args:
            tensor: the value.
            region: the nodes that compute it from what the match reads.
        """
        for written in self._written(tensor):
            self._tried += 1
            try:
                candidate = self._candidate(tensor, region, written)
                prove(candidate)
            except ProofFailedError as reason:
                log.debug("%s is not a state in this order: %s", tensor.name, reason)
                detach(written.nodes)
                if self._tried == MAX_TRIED:
                    break
                continue
            return FinalState(tuple(written.nodes), written.result, candidate)
        return None

    def _candidate(
        self, tensor: gs.Variable, region: Sequence[gs.Node], written: _Written
    ) -> RewriteCandidate:
        nodes = [*self.proven.replacement[0], *written.nodes]
        inputs = [(t, self.evaluator.sizes(t)) for t in inputs_of(region, nodes)]
        unknown = [t.name for t, sizes in inputs if sizes is None or t.dtype is None]
        if unknown:
            raise ProofFailedError(f"the type of {unknown[0]} is not known")
        known = {t.name: self.evaluator.values.numbers(t) for t, _ in inputs}
        return replace(
            self.proven,
            inputs=[(t, sizes) for t, sizes in inputs if sizes is not None],
            known={name: x for name, x in known.items() if x is not None},
            original=(region, tensor),
            replacement=(nodes, written.result),
        )

    def _written(self, tensor: gs.Variable) -> Iterator[_Written]:
        """Yield the states of the node in each order of dims that gives the shape of a value."""
        sizes = self.evaluator.sizes(tensor)
        op = all_ops().get(self.fused.op)
        if op is None:
            return
        for port in op.states(view_of(self.fused, op)):
            dims: list[Index] = [self.roles.batch, *(fresh(Size(n)) for n in port.sizes)]
            for groups in orders(dims, sizes or []):
                state = _state(self.fused, op, port, dims)
                yield _Written(state, port, dims, groups, tensor, self.roles, self.undelayed)

    def clear_unread(self) -> None:
        """Leave out states of the node that nothing reads."""
        outputs = self.fused.outputs
        for place in range(1, len(outputs)):
            if not outputs[place].outputs:
                outputs[place] = gs.Variable.empty()
        while outputs[-1].is_empty():
            outputs.pop()


class _Written(Nodes):
    """Nodes that bring a state of a node to the dims of a value."""

    def __init__(
        self,
        state: gs.Tensor,
        port: StatePort,
        dims: Sequence[Index],
        groups: Sequence[Index],
        tensor: gs.Variable,
        roles: Roles,
        undelayed: Undelayed | None,
    ) -> None:
        super().__init__(f"{tensor.name}/{port.name}", roles.leaves)
        if undelayed is not None and port.name == STATE:
            state = undelayed.after_last(self, state, port.sizes) or state
        result = self.grouped(Leaf(state, tuple(dims)), groups)
        result = self.cast(result, np.dtype(tensor.dtype or state.dtype))
        # A name of its own: the state may be read as it is.
        self.result = self.add("Identity", [result], np.dtype(result.dtype), shape=tensor.shape)


def _state(fused: gs.Node, op: Op, port: StatePort, dims: Sequence[Index]) -> gs.Variable:
    """Return the tensor of a node's state behind its tokens."""
    while len(fused.outputs) <= port.present:
        fused.outputs.append(gs.Variable.empty())
    if fused.outputs[port.present].is_empty():
        shape = [written_size(size_of(index)) for index in dims]
        state = gs.Variable(f"{fused.name}/{port.name}", state_type(fused, op, port), shape)
        fused.outputs[port.present] = state
    return fused.outputs[port.present]
