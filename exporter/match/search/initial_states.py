"""States before the first token that are given: inputs of the model, or computed of them.

    y_t = q_t (exp(G_t) S + sum_s exp(G_t - G_s) k_s v_s)    ->    LinearAttention(q, k, v, S)

An attention is affine in such a state. So it is read as if the state was zero, and then takes the
state as its past, in each order of dims that the shape allows; the proof, which draws the state as
any other input, decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import detach
from linexport.graph.monomials import Size
from linexport.graph.op_nodes import Start, start_of, state_type, view_of
from linexport.graph.operators import LOOPS
from linexport.graph.scan_body import starts_of
from linexport.match.emit.candidate import inputs_of
from linexport.match.emit.layout import Nodes
from linexport.match.forms.axes import Index, fresh
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Leaf
from linexport.match.roles.roles import Roles
from linexport.match.search.state_layouts import orders
from linexport.plugins.ops.registry import all_ops

LOWEST_RANK = 3
"""Dims of a state of several heads, or of a matrix: inputs of fewer may be any conditioning."""


def given_states(graph: gs.Graph) -> frozenset[str]:
    """Return the names of values that may be states before the first token."""
    found = {t.name for t in _inputs_without_tokens(graph)}
    starts = [t for node in graph.nodes if node.op in LOOPS for t in starts_of(node)]
    if starts:
        evaluator = Evaluator(graph)
        found |= {t.name for t in starts if _is_computed(evaluator, t)}
    return frozenset(found)


def _is_computed(e: Evaluator, start: gs.Tensor) -> bool:
    """Return whether what a loop begins with depends on inputs."""
    known = start.is_empty() or e.is_constant(start) or e.is_weight(start)
    return not known and not e.values.is_zero(start) and e.form(start) is not None


def _inputs_without_tokens(graph: gs.Graph) -> list[gs.Variable]:
    """Return inputs of several dims, all of which are numbers or batches, where others have tokens.

    Where no size is dynamic but that of the batch, nothing tells tokens from heads.
    """
    shapes = {t.name: [d for d in t.shape or () if isinstance(d, str)] for t in graph.inputs}
    batches = {t.shape[0] for t in graph.inputs if t.shape and isinstance(t.shape[0], str)}
    tokens = {d for dims in shapes.values() for d in dims} - batches
    found = [t for t in graph.inputs if t.shape is not None and len(t.shape) >= LOWEST_RANK]
    return [t for t in found if tokens and not {*shapes[t.name]} & tokens]


@dataclass(frozen=True)
class Begun:
    """Nodes that give a fused node the states that it begins with.

    Attributes:
        nodes: bring given states to the dims of pasts.
        pasts: with where each is put.
        zeros: what is there, if anything.
    """

    nodes: tuple[gs.Node, ...]
    pasts: tuple[tuple[Start, gs.Tensor], ...]
    zeros: tuple[gs.Tensor, ...]

    def put(self) -> None:
        """Have the node begin with the states."""
        for start, past in self.pasts:
            start.put(past)

    def take_back(self) -> None:
        """Have the node begin with zeros again."""
        for (start, _), zeros in zip(self.pasts, self.zeros, strict=True):
            start.put(zeros)
        detach(self.nodes)


class InitialStates:
    """States that a region begins with, as pasts of the node that takes its place.

    Args:
        evaluator: of the graph, which reads given states as zeros.
        roles: of the match.
        region: the nodes that are replaced.
        fused: what takes their place.
    """

    def __init__(
        self, evaluator: Evaluator, roles: Roles, region: Sequence[gs.Node], fused: gs.Node
    ) -> None:
        self.roles, self.fused, self._known = roles, fused, evaluator.values
        read = inputs_of(region)
        self.states = [t for t in read if t.name in evaluator.initial]
        self._sizes = [evaluator.sizes(t) or [] for t in self.states]

    def ways(self) -> Iterator[Begun]:
        """Yield the ways in which pasts of the node may be the states, that none of them is first.

        What is computed may not depend on a state: on the maximum that exponents begin with, say.
        """
        yield Begun((), (), ())
        op = all_ops().get(self.fused.op)
        ports = () if op is None else op.states(view_of(self.fused, op))
        starts = {p: start_of(self.fused, p, self._known, self._known.is_zero) for p in ports}
        for chosen in permutations(ports, len(self.states)):
            places = [start for port in chosen if (start := starts[port]) is not None]
            if len(places) < len(chosen):
                continue
            dims: list[list[Index]] = [
                [self.roles.batch, *(fresh(Size(n)) for n in port.sizes)] for port in chosen
            ]
            each = zip(dims, self._sizes, strict=True)
            for groups in product(*(_layouts(own, sizes) for own, sizes in each)):
                types = [state_type(self.fused, op, port) for port in chosen if op is not None]
                yield self._written(places, types, dims, groups)

    def _written(
        self,
        places: Sequence[Start],
        types: Sequence[np.dtype[np.generic]],
        dims: Sequence[Sequence[Index]],
        groups: Sequence[Sequence[Index]],
    ) -> Begun:
        nodes, pasts = list[gs.Node](), list[tuple[Start, gs.Tensor]]()
        each = zip(self.states, places, types, dims, groups, strict=True)
        for state, place, kind, own, group in each:
            writer = Nodes(f"{self.fused.name}/{state.name}", self.roles.leaves)
            past = writer.cast(writer.grouped(Leaf(state, tuple(group)), own), kind)
            pasts.append((place, past))
            nodes += writer.nodes
        zeros = tuple(start.tensor for start in places)
        return Begun(tuple(nodes), tuple(pasts), zeros)


def _layouts(dims: Sequence[Index], sizes: Sequence[Size]) -> list[list[Index]]:
    """Return dims of a past as those of a state, which may be the same for all rows."""
    found = list(orders(dims, sizes))
    return found or list(orders(dims[1:], sizes))
