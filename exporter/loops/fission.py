"""States of a Scan that others read, and that read none of these -> a Scan of their own.

    Scan: m' = max(f + m, i)                       Scan: m' = max(f + m, i); a = exp(f + m - m')
          C' = exp(f + m - m') C + k v^T    ->     Scan over a: C' = a C + k v^T

To the second loop the first one's results are scanned inputs. It may be linear where both together
are not: behind maxima that keep exponents small (the recurrent mLSTM, RWKV-4) and behind a softmax
of the first state (gated slots).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

import onnx_graphsurgeon as gs

from linexport.graph.copies import copy_nodes
from linexport.graph.edit import index_of, nodes_behind, producer
from linexport.graph.operators import AXES_ONLY
from linexport.graph.scan_body import (
    StepStates,
    has_directions,
    nonlinear_operator,
    nonlinear_read,
)
from linexport.graph.tensors import known_shape
from linexport.loops.step_nodes import (
    copy_given,
    drop_unread,
    give_every_step,
    numbers_in,
    scanned_axes,
)

MAX_STATES = 8
"""Loops with more states than this are not split: every subset of them is tried."""


class Parts(NamedTuple):
    """How a Scan is split in two.

    Attributes:
        first: places of the states that read no other.
        crossing: what the second loop reads of these.
    """

    first: frozenset[int]
    crossing: list[gs.Tensor]


class PartedStates(StepStates):
    """The states of a Scan, and what a loop of some of them would hand on to the others."""

    def __init__(self, scan: gs.Node) -> None:
        body: gs.Graph = scan.attrs["body"]
        states = body.inputs[: -scan.attrs["num_scan_inputs"]]
        # A value of another loop's state has no sizes in a loop either.
        super().__init__(body, states, sizes=True)
        self.values = StepStates(body, states)

    def closed(self) -> Iterator[frozenset[int]]:
        """Yield the sets of states that read no state outside of them, not all states."""
        places = range(self.count)
        for size in range(1, self.count):
            for chosen in map(frozenset, combinations(places, size)):
                # Such states can run first, without the others: no value goes back to them.
                if all(self.states_of(self.body.outputs[i]) <= chosen for i in chosen):
                    yield chosen

    def crossing(self, first: frozenset[int], again: Callable[[gs.Node], bool]) -> list[gs.Tensor]:
        """Return what the other states and their outputs read of the first ones.

        Args:
            first: places of these.
            again: whether a node is computed again of what it reads, which crosses over instead.
        """
        found: dict[str, gs.Tensor] = {}
        pending = [t for n in self.body.nodes if not self._is_of(n, first) for t in n.inputs]
        others = set(range(self.count)) - first
        pending += [self.body.outputs[i] for i in others]
        while pending:
            tensor = pending.pop()
            of = self.states_of(tensor)
            # A value of no state is of tokens, which both loops read; one of other states is
            # computed in the second loop.
            if not of or not of <= first or tensor.name in found:
                continue
            node = producer(tensor)
            # It is recomputed in the second loop from its inputs, which cross over in its place.
            if node is not None and again(node):
                pending += node.inputs
            else:
                found[tensor.name] = tensor
        return list(found.values())

    def second_outputs(self, first: frozenset[int]) -> list[int]:
        """Return the places of the outputs that are not of the first states alone."""
        scanned = range(self.count, len(self.body.outputs))
        return [i for i in scanned if not self.states_of(self.body.outputs[i]) <= first]

    def _is_of(self, node: gs.Node, first: frozenset[int]) -> bool:
        return all(self.states_of(o) <= first for o in node.outputs)

    def is_made_again(self, node: gs.Node) -> bool:
        """Return whether a node moves values, or makes more than each of a state that it reads."""
        if node.op in AXES_ONLY:
            return True  # it costs nothing, and what it reads crosses over once
        # An expanded value is larger than what it is made of: stored for every token, it would cost
        # more than computing it twice.
        made = numbers_in(node.outputs)
        return all(numbers_in([t]) < made for t in node.inputs if self.states_of(t))


def plan(graph: gs.Graph, scan: gs.Node) -> Parts | None:
    """Return how to split a Scan so that a part becomes linear; None if no split does."""
    if scan.op != "Scan" or has_directions(scan):
        return None
    by_step, by_read = nonlinear_operator(scan), nonlinear_read(scan)
    if by_step is None and by_read is None:
        return None
    known = PartedStates(scan)
    if known.count > MAX_STATES or not is_plain(known.body):
        return None
    found = [Parts(first, known.crossing(first, known.is_made_again)) for first in known.closed()]
    found = [parts for parts in found if _gains(known, parts, read=by_step is None)]
    given = [*known.body.inputs[known.count :], *known.body.outputs[known.count :]]
    # The smallest first loop: a numerator and its denominator remain together as one attention.
    best = min(
        found, key=lambda parts: (len(parts.first), numbers_in(parts.crossing)), default=None
    )
    # What crosses over is stored for every token: not more than the loop reads and gives anyhow.
    return None if best is None or numbers_in(best.crossing) > numbers_in(given) else best


def _gains(known: PartedStates, parts: Parts, read: bool) -> bool:
    """Return whether the second loop is linear in its states, with ``read`` in its outputs too."""
    body = known.body
    after = [body.outputs[i] for i in range(known.count) if i not in parts.first]
    if read:
        after += [body.outputs[i] for i in known.second_outputs(parts.first)]
    # Values of the first states are tokens to the second loop, so that only its own states count.
    return known.values.first_nonlinear(nodes_behind(after), without=parts.first) is None


def is_plain(body: gs.Graph) -> bool:
    """Return whether a body has no bodies inside, and the shapes of all its values are known."""
    nested = any(isinstance(a, gs.Graph) for n in body.nodes for a in n.attrs.values())
    return not nested and all(t.shape is not None for n in body.nodes for t in n.outputs)


def take_apart(graph: gs.Graph, scan: gs.Node, parts: Parts) -> None:
    """Put two Scans in the place of one; the second scans what the first gives."""
    known, axes = PartedStates(scan), scanned_axes(scan)
    body, count, stem = known.body, known.count, scan.name or scan.outputs[0].name
    later = known.second_outputs(parts.first)
    first = [*sorted(parts.first), *(i for i in range(count, len(body.outputs)) if i not in later)]
    second = [*(i for i in range(count) if i not in parts.first), *later]
    behind = _second(known, parts, second, f"{stem}/second")
    stacked = [give_every_step(scan, t, list(known_shape(t)), "for_second") for t in parts.crossing]
    first += range(len(scan.outputs) - len(stacked), len(scan.outputs))
    body.inputs = [*(body.inputs[i] for i in first if i < count), *body.inputs[count:]]
    body.outputs = [body.outputs[i] for i in first]
    sides = scan.attrs.get("scan_output_axes") or [0] * (len(scan.outputs) - count)
    nodes = []
    for name, inside, places in (("first", body, first), ("second", behind, second)):
        given = [sides[i - count] for i in places if i >= count]
        attrs = {"body": inside, "scan_output_axes": given}
        inputs = [*(scan.inputs[i] for i in places if i < count), *scan.inputs[count:]]
        outputs = [scan.outputs[i] for i in places]
        nodes.append(gs.Node("Scan", f"{stem}/{name}", attrs, inputs, outputs))
    nodes[1].inputs.extend(stacked)
    place = index_of(graph, scan)
    scan.inputs, scan.outputs = [], []
    graph.nodes[place : place + 1] = nodes
    for node, scanned in zip(nodes, (axes, axes + [0] * len(stacked)), strict=True):
        node.attrs["body"].cleanup().toposort()
        copy_given(node.attrs["body"])
        drop_unread(node, scanned)


def _second(known: PartedStates, parts: Parts, given: list[int], name: str) -> gs.Graph:
    """Return the body of the second loop, which reads what crosses over as tokens.

    Args:
        known: the body of both.
        parts: how it is split.
        given: places of the outputs that the second loop gives, states first.
        name: begins the names of its values.
    """
    body, count = known.body, known.count
    own = [gs.Variable(f"{name}/{t.name}", t.dtype, list(known_shape(t))) for t in body.inputs]
    inner = [gs.Variable(f"{name}/{t.name}/given", t.dtype, t.shape) for t in parts.crossing]
    both = gs.Graph(body.nodes, body.inputs, [*body.outputs, *parts.crossing], opset=body.opset)
    nodes, copies = copy_nodes(both, own, name, body.opset)
    standing = dict(zip(map(id, copies[len(body.outputs) :]), inner, strict=True))
    for node in nodes:
        node.inputs = [standing.get(id(t), t) for t in node.inputs]
    states = [own[i] for i in given if i < count]
    outputs = [standing.get(id(copies[i]), copies[i]) for i in given]
    inputs = [*states, *own[count:], *inner]
    return gs.Graph(nodes, inputs, outputs, name=name, opset=body.opset)
