"""Outputs that a Scan's step computes of its states alone -> computed after it, of all tokens.

    Scan: h = a h + x; y = h W        ->    Scan: h = a h + x; H        Y = H W
    Scan: ...; y = n / max(d, e)      ->    Scan: ...; N, D             Y = N / max(D, e)
    Scan: ...; y = (n + w v) / (d + w)   ->    Scan: ...; n + w v, d + w    Y = ... / ...

Products with stored matrices, functions that are no sums or products and quotients by a state and
something of the token leave, and all that is computed of them, and what puts values side by side at
the end. What is left is a recurrence that recognition can read, and of any loop fewer operators for
each token. What crosses over must be no larger than what the loop reads and gives anyway: states
that are matrices stay in the step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult, rewrite_matches
from linexport.graph.copies import name_constants_apart
from linexport.graph.dims import Shape
from linexport.graph.edit import index_of, nodes_behind, producer
from linexport.graph.operators import AXES_ONLY, COMPARISONS, ELEMENTWISE
from linexport.graph.scan_body import StepStates, has_directions
from linexport.loops import fission
from linexport.loops.step_nodes import (
    ARITHMETIC,
    give_every_step,
    keep_outputs,
    leaves,
    numbers_in,
    output_axes,
    scanned_axes,
    with_steps_along,
)
from linexport.loops.vectorize_over_time import (
    NORMALISERS,
    PROJECTIONS,
    LiftedSteps,
    ScannedTokens,
)

log = logging.getLogger(__name__)

FUNCTIONS = (ELEMENTWISE - ARITHMETIC - COMPARISONS) | frozenset(NORMALISERS)


@dataclass(frozen=True)
class _Plan:
    """Nodes that leave the body of one Scan.

    Attributes:
        nodes: those that leave, in the order of evaluation.
        crossing: what they read of states, which the Scan gives as outputs instead.
        shapes: of the values at one step.
    """

    nodes: list[gs.Node]
    crossing: list[gs.Tensor]
    shapes: dict[str, Shape]


def run(graph: gs.Graph) -> PassResult:
    """Take what only outputs need, and recognition does not follow, out of every Scan."""
    sunk = rewrite_matches(graph, _plan, _sink, log).modified
    parted = False
    while rewrite_matches(graph, fission.plan, fission.take_apart, log).modified:
        parted = True
    again = parted and rewrite_matches(graph, _plan, _sink, log).modified
    return PassResult(sunk or parted or again)


@dataclass(frozen=True)
class _Step:
    """The body of a Scan, which computes one step.

    Attributes:
        body: of the Scan.
        states: the number of its states.
        dependence: says which values depend on states.
        shapes: of its inputs, and of what is found of its values while nodes are gone through.
    """

    body: gs.Graph
    states: int
    dependence: StepStates
    shapes: dict[str, Shape]

    @classmethod
    def of(cls, scan: gs.Node) -> _Step | None:
        """Return the step of a Scan; None of other nodes, or where shapes are not known."""
        if scan.op != "Scan" or has_directions(scan):
            return None
        body = scan.attrs["body"]
        states = len(body.inputs) - scan.attrs["num_scan_inputs"]
        shapes: dict[str, Shape] = {
            t.name: list(t.shape) for t in body.inputs if t.shape is not None
        }
        if len(shapes) < len(body.inputs) or any(t.shape is None for t in scan.inputs[states:]):
            return None
        return cls(body, states, StepStates(body, body.inputs[:states], sizes=True), shapes)

    @cached_property
    def tokens(self) -> set[str]:
        """Names of what it is given of the tokens."""
        return {t.name for t in self.body.inputs[self.states :]}

    @cached_property
    def made(self) -> set[str]:
        """Names of what it computes."""
        return {o.name for n in self.body.nodes for o in n.outputs}

    def leaving(self) -> list[gs.Node] | None:
        """Return the nodes that can leave, in order; None where one has to that cannot."""
        kept = {id(n) for n in nodes_behind(self.body.outputs[: self.states])}
        within, left, chosen = self.made | self.shapes.keys(), set[str](), list[gs.Node]()
        for node in self.body.nodes:
            known = leaves(node, within, self.shapes, outer=True)
            if not known:
                written = {o.name: list(o.shape) for o in node.outputs if o.shape is not None}
                self.shapes.update(written)
            if not any(map(self.dependence.states_of, node.inputs)):
                continue
            may = known and id(node) not in kept
            # A reader of what has left comes after it.
            must = any(t.name in left for t in node.inputs)
            if must and not may:
                return None
            if may and (must or self._is_reason(node)):
                chosen.append(node)
                left |= {o.name for o in node.outputs}
        return chosen

    def _is_reason(self, node: gs.Node) -> bool:
        """Return whether recognition does not follow a node that reads states."""
        square = node.op == "Mul" and all(map(self.dependence.states_of, node.inputs))
        return (
            square
            or node.op in PROJECTIONS
            or _begins_function(node)
            or _puts_together(node)
            or _divides_by_more(node, self.dependence, self.made | self.tokens)
        )


def _plan(graph: gs.Graph, scan: gs.Node) -> _Plan | None:
    """Return what can leave a Scan; None where nothing can, or too much would cross over."""
    step = _Step.of(scan)
    chosen = step.leaving() if step is not None else None
    if step is None or not chosen:
        return None
    shapes, within = step.shapes, step.made | step.shapes.keys()
    outside = {o.name for n in chosen for o in n.outputs} | step.tokens
    read = {t.name: t for n in chosen for t in n.inputs if t.name in within}
    crossing = [t for name, t in read.items() if name not in outside]
    if any(t.name not in shapes for t in crossing):
        return None
    given = [*step.body.inputs[step.states :], *step.body.outputs[step.states :]]
    if numbers_in(crossing, shapes) > numbers_in(given, shapes):
        return None
    return _Plan(chosen, crossing, shapes)


def _begins_function(node: gs.Node) -> bool:
    """Return whether a node is a function, or groups values for one, as a group norm does."""
    readers = [reader.op for o in node.outputs for reader in o.outputs]
    grouped = node.op == "Reshape" and readers and all(op in FUNCTIONS for op in readers)
    return node.op in FUNCTIONS or bool(grouped)


def _divides_by_more(node: gs.Node, step: StepStates, of_step: set[str]) -> bool:
    """Return whether a quotient's divisor adds something of the token to what is of states.

    Recognition reads divisors that are a sum over keys and a number.
    """
    added = producer(node.inputs[1], "Add") if node.op == "Div" else None
    if added is None:
        return False
    others = [t for t in added.inputs if not step.states_of(t)]
    return len(others) == 1 and others[0].name in of_step


def _puts_together(node: gs.Node) -> bool:
    """Return whether a node puts values side by side, and outputs are what it gives."""
    return node.op == "Concat" and _gives(node)


def _gives(node: gs.Node) -> bool:
    """Return whether nothing but moves reads what a node gives."""
    after = [reader for o in node.outputs for reader in o.outputs]
    return all(reader.op in AXES_ONLY and _gives(reader) for reader in after)


def _sink(graph: gs.Graph, scan: gs.Node, plan: _Plan) -> None:
    """Move the nodes after the Scan, whose outputs are what crosses over."""
    body, count = scan.attrs["body"], scan.attrs["num_scan_inputs"]
    states, stem = len(body.inputs) - count, scan.name or scan.outputs[0].name
    inner = zip(body.inputs[states:], scan.inputs[states:], scanned_axes(scan), strict=True)
    scanned = {t.name: ScannedTokens(outer, axis) for t, outer, axis in inner}
    gone = {o.name for n in plan.nodes for o in n.outputs}
    for tensor in plan.crossing:
        whole = give_every_step(scan, tensor, plan.shapes[tensor.name], "all")
        scanned[tensor.name] = ScannedTokens(whole, 0)
    axes = output_axes(scan)
    lifted = LiftedSteps(f"{stem}/after", scanned, plan.shapes)
    lifted.take(body, plan.nodes)
    name_constants_apart(lifted.nodes, graph, lifted.stem)
    nodes, kept = lifted.nodes, list[int]()
    for place, tensor in enumerate(body.outputs[states:]):
        if tensor.name not in gone:
            kept.append(place)
            continue
        output, steps = scan.outputs[states + place], lifted.whole[tensor.name]
        nodes.append(with_steps_along(axes[place], steps, output))
    keep_outputs(scan, [*range(states), *(states + i for i in kept)])
    place = index_of(graph, scan)
    graph.nodes[place + 1 : place + 1] = nodes


PASS = Pass(
    name="sink_from_scans",
    stage="canonicalise",
    requires="the values in the bodies of Scans have known shapes",
    ensures="Scans compute of their states what the next states, sums and products need",
    run=run,
)
