"""Scan whose states are pairs that every step turns and scales -> LinearAttention, see ``turns``.

    re' = a_t re - b_t im + c_t        as of a diagonal state space with complex rates, written in
    im' = b_t re + a_t im + d_t        real numbers: a = r cos w, b = r sin w

a and b are what a step makes of the state (1, 0), and c and d what it makes of (0, 0): so pairs may
be two states, halves of an axis, or neighbours, and the step may be written in any operators. That
it turns pairs at all is what the proof shows. What the step gives out is computed of all states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.copies import copy_nodes, disconnect, name_constants_apart
from linexport.graph.dims import Shape
from linexport.graph.edit import is_read
from linexport.graph.findings import Findings, RejectedMatch, UnmatchedCandidate
from linexport.graph.monomials import parse
from linexport.graph.scan_body import is_linear_scan
from linexport.graph.tensors import known_shape
from linexport.loops.pairs import StatePairs, layouts
from linexport.loops.step_algebra import StepAlgebra
from linexport.loops.step_nodes import leaves, multiplies, numbers_in, scanned_axes
from linexport.loops.vectorize_over_time import (
    OPERATORS,
    PARTS,
    PROJECTIONS,
    LiftedSteps,
    ScannedTokens,
)
from linexport.manifest.matches import MatchRecord, ProofRecord
from linexport.match.emit.candidate import inputs_of
from linexport.match.emit.complex_diagonal import FLOAT, LARGE, Pair, Turns
from linexport.match.emit.tokens import delayed_tokens
from linexport.match.forms.evaluate import Evaluator
from linexport.match.proof.prove import ProofFailedError, RewriteCandidate, prove
from linexport.match.roles.subgraph import dead_nodes, reads
from linexport.match.search.stateful_region import Regions, is_analytic
from linexport.passes import split_sequence

log = logging.getLogger(__name__)

IN_FRONT = (OPERATORS - {*PROJECTIONS}) | {"Shape", "ConstantOfShape", "Range", "CastLike", "Tile"}
"""Operators in front of a loop that the proof runs with it, so that its rates are what they are.

Of what depends on the inputs those alone that move values or make polynomials, exponentials, sines
and cosines of them. Values of others, of a choice by a comparison or a row of a table, are drawn:
random numbers may not meet what is chosen once in a thousand times.
"""

KNOWN_OPERATORS = {"Cos", "Sin", *PARTS, "Tile"}
"""Sines and cosines, which random numbers know as well, and what takes and repeats parts."""


class TooLargeError(NoMatchError):
    """States of all tokens at once would take more memory and time than the loop does."""


def replace_turning_loops(graph: gs.Graph, withdrawn: Mapping[str, str]) -> Findings:
    """Replace Scans whose states are turned.

    Args:
        graph: changed in place.
        withdrawn: matches to leave as they are, by the value they compute, with the reason.
    """
    findings = Findings()
    if not any(node.op == "Scan" for node in graph.nodes):
        return findings
    graph.cleanup().toposort()
    evaluator = Evaluator(graph)
    data = Regions(graph, evaluator).data
    for loop in [node for node in graph.nodes if node.op == "Scan"]:
        if not _is_linear_loop(evaluator, loop) or not _is_followed(loop, data):
            continue
        where = next(t.name for t in loop.outputs if is_read(graph, t))
        if where in withdrawn:
            findings += Findings(rejected=(RejectedMatch(where, withdrawn[where]),))
            continue
        for number, pairs in enumerate(layouts(loop)):
            try:
                turning = _Turning(graph, evaluator, loop, pairs, f"{where}/{number}", data)
                match = turning.replaced()
            except TooLargeError as reason:
                findings += Findings((), (UnmatchedCandidate(where, (loop.name,), str(reason)),))
                break
            except (NoMatchError, ProofFailedError) as reason:
                log.debug("%s is left as it is: %s", where, reason)
                continue
            findings += Findings((match,))
            break
    return findings


def _is_linear_loop(e: Evaluator, loop: gs.Node) -> bool:
    """Return whether a Scan is linear in its states, which are zero first and not read last."""
    body, count = loop.attrs["body"], len(loop.inputs) - loop.attrs["num_scan_inputs"]
    tokens = loop.inputs[count:]
    shaped = all(t.shape is not None for t in (*body.inputs, *tokens))
    typed = all(t.dtype == FLOAT for t in body.inputs[:count])
    last = any(is_read(e.graph, t) for t in loop.outputs[:count])
    zero = all(map(e.values.is_zero, loop.inputs[:count]))
    if not (shaped and typed and zero and tokens) or last:
        return False
    return count in (1, 2) and is_linear_scan(loop)


def _is_followed(loop: gs.Node, data: Collection[str]) -> bool:
    """Return whether random numbers tell what a step computes: it has no choice by a comparison."""
    body = loop.attrs["body"]
    inside = {t.name for t in body.inputs} | {o.name for node in body.nodes for o in node.outputs}
    of_data = inside.union(data)
    return all(node.op in KNOWN_OPERATORS or is_analytic(node, of_data) for node in body.nodes)


class _Turning:
    """A loop, read with its pairs in some places.

    Args:
        graph: that it is in.
        evaluator: of the graph.
        loop: a Scan.
        pairs: where they are.
        name: begins all names.
        data: names of the values that depend on the inputs of the graph.
    """

    def __init__(
        self,
        graph: gs.Graph,
        evaluator: Evaluator,
        loop: gs.Node,
        pairs: StatePairs,
        name: str,
        data: Collection[str],
    ) -> None:
        self.graph, self.evaluator, self.loop, self.data = graph, evaluator, loop, data
        self.pairs, self.name = pairs, name
        self.count = len(loop.inputs) - loop.attrs["num_scan_inputs"]
        self.axes = scanned_axes(loop)
        self.length = known_shape(loop.inputs[-1])[self.axes[-1]]
        width = math.prod(int(n) for n in pairs.shape[1:])
        self.turns = Turns(f"{name}/turns", pairs.shape[0], self.length, width)
        self.scratch: list[gs.Node] = []
        loop.attrs["body"].toposort()

    def replaced(self) -> MatchRecord:
        """Put the operator in the place of the loop.

        Raises:
            NoMatchError: an operator of the step is not followed, or it turns no pairs.
            ProofFailedError: it computes something else.
        """
        loop, turns = self.loop, self.turns
        try:
            before, parts = self._parts()
            states = self.pairs.joined(turns, parts)
            region, proof = self._proven(before, states)
            self._check_size()
            after, outputs = self._outputs(parts, states)
        except (NoMatchError, ProofFailedError):
            disconnect([*self.scratch, *turns.nodes])
            raise
        placed = [*before, *turns.nodes, *after]
        used = loop.outputs[self.count :]
        loop.outputs = [gs.Variable(f"{t.name}/before") for t in loop.outputs]
        for old, whole, axis in zip(used, outputs, self._output_axes(), strict=True):
            order = list(range(1, len(known_shape(whole))))
            order.insert(axis % len(known_shape(whole)), 0)
            op, attrs = ("Transpose", {"perm": order}) if axis else ("Identity", {})
            placed.append(gs.Node(op, f"{old.name}/{op}", attrs, [whole], [old]))
        kept = set(map(id, placed))
        disconnect([node for node in self.scratch if id(node) not in kept])
        outputs_of_graph = set(map(id, self.graph.outputs))
        replaced = tuple(node.name for node in dead_nodes(region, outputs_of_graph))
        name_constants_apart(placed, self.graph, self.name)
        self.graph.nodes += placed
        loop.inputs.clear()
        loop.outputs.clear()
        count = turns.count
        return MatchRecord(
            where=next(t.name for t in used if is_read(self.graph, t)),
            update_rule="gated",
            causal=True,
            normalize=False,
            scale=1.0,
            eps=0.0,
            q_num_heads=count,
            kv_num_heads=count,
            key_heads=count,
            d_k=1,
            d_v=2,
            query_map=None,
            key_map=None,
            map_proven_to=None,
            masked=False,
            replaced=replaced,
            added=tuple(node.name for node in turns.nodes),
            proof=proof,
        )

    def _parts(self) -> tuple[list[gs.Node], Pair]:
        """Write h, (B, T, N), and return nodes in front of that."""
        step = self._step("columns")
        columns = StepAlgebra(step, step.inputs[: self.count])
        basis = self.pairs.basis(np.dtype(step.inputs[0].dtype), self.name)
        (own, kept), (added_by, added) = (
            self.pairs.parts(states, f"{self.name}/{stem}")
            for stem, states in (("kept", columns.linear(basis)), ("added", columns.added()))
        )
        turning = [x for x in kept if x is not None]
        given = [x for x in added if x is not None]
        if len(turning) != len(kept) or not given:
            raise NoMatchError("it turns no pairs")
        found = [*turning, *given]
        nodes = [*step.nodes, *columns.nodes, *own, *added_by]
        self.scratch += nodes
        lifted = self._lifted(step, nodes, found, {}, {})
        shapes = [lifted.shapes.get(x.name) for x in given]
        if any(shape is None or self.pairs.shape[0] not in shape for shape in shapes):
            raise NoMatchError("nothing of the tokens is added to its state")
        a, b = (self._packed(lifted, x) for x in turning)
        parts = [None if x is None else self._packed(lifted, x) for x in added]
        whole = next(x for x in parts if x is not None)
        c, d = (self.turns.op.Mul(whole, 0.0) if x is None else x for x in parts)
        return lifted.nodes, self.turns.write((a, b), (c, d))

    def _packed(self, lifted: LiftedSteps, part: gs.Tensor) -> gs.Variable:
        """Return a value of a step as (B, T, N); batch and tokens may be 1."""
        turns, shape = self.turns, self.pairs.shape
        x, own = lifted.of(part), list(lifted.shapes.get(part.name) or part.shape or ())
        tokens = [self.length] if part.name in lifted.whole else [1]
        dtype = np.dtype(x.dtype)

        def numbers(values: Iterable[int]) -> gs.Constant:
            return gs.Constant(turns.name("numbers"), np.asarray(list(values), LARGE))

        # Tokens first, then all dims of a state.
        new = [
            *([0] if part.name not in lifted.whole else []),
            *range(1, 1 + len(shape) - len(own)),
        ]
        own = [*[1] * (len(shape) - len(own)), *own]
        if new:
            x = turns.add("Unsqueeze", [x, numbers(new)], dtype, shape=[*tokens, *own])
        if own[1:] != shape[1:]:
            own[1:] = shape[1:]
            sizes = numbers([1, 1, *map(int, own[1:])])
            x = turns.add("Expand", [x, sizes], dtype, shape=[*tokens, *own])
        perm = {"perm": [1, 0, *range(2, 1 + len(own))]}
        whole = [own[0], *tokens, *own[1:]]
        x = turns.add("Transpose", [x], dtype, attrs=perm, shape=whole)
        sizes = numbers([0, 0, turns.count])
        return turns.add("Reshape", [x, sizes], dtype, shape=[own[0], *tokens, turns.count])

    def _outputs(
        self, parts: Pair, states: Sequence[gs.Tensor]
    ) -> tuple[list[gs.Node], list[gs.Tensor]]:
        """Write what the loop gives, tokens first, from all of its states."""
        step = self._step("outputs")
        given, known = dict[str, ScannedTokens](), dict[str, Shape]()
        after, results = step.outputs[: self.count], step.outputs[self.count :]
        for tensor, whole in zip(after, states, strict=True):
            while True:
                given[tensor.name] = ScannedTokens(whole, 0)
                known[tensor.name] = list(known_shape(whole)[1:])
                node = tensor.inputs[0] if tensor.inputs else None
                if node is None or node.op != "Identity":
                    break
                tensor = node.inputs[0]
        needed = _needed(step.nodes, results, given)
        before = step.inputs[: self.count]
        if any(t is own for n in needed for t in n.inputs for own in before):
            real, imaginary = (delayed_tokens(self.turns, part) for part in parts)
            earlier = self.pairs.joined(self.turns, (real, imaginary))
            for tensor, whole in zip(before, earlier, strict=True):
                given[tensor.name] = ScannedTokens(whole, 0)
                known[tensor.name] = list(known_shape(whole)[1:])
        lifted = self._lifted(step, step.nodes, results, given, known)
        wholes = [lifted.of(t) for t in results]
        if any(t.name not in lifted.whole for t in results):
            raise NoMatchError("an output is the same for all tokens")
        return lifted.nodes, wholes

    def _check_size(self) -> None:
        """Refuse states that are larger than what a step reads and gives, as outer products are.

        On one core 1,024 tokens of 128 pairs, of 64 numbers for each token, take 11 ms in place of
        the 6 of a loop; of 8 pairs of 32 numbers 0.9 in place of 4.

        Raises:
            TooLargeError: they are.
        """
        given = [*self.loop.attrs["body"].inputs[self.count :], *self.loop.outputs[self.count :]]
        known = numbers_in(given)
        if 2 * self.turns.count > known:
            raise TooLargeError(
                f"Scan {self.loop.name} is linear in its state of {2 * self.turns.count} numbers, "
                f"where a token has only {known}: the states of all tokens at once would cost more "
                "than the loop, which is kept"
            )

    def _lifted(
        self,
        step: gs.Graph,
        nodes: Sequence[gs.Node],
        targets: Sequence[gs.Tensor],
        given: Mapping[str, ScannedTokens],
        shapes: Mapping[str, Shape],
    ) -> LiftedSteps:
        """Compute values of a step for all tokens, where states are given for all of them."""
        tokens = zip(
            step.inputs[self.count :], self.loop.inputs[self.count :], self.axes, strict=True
        )
        scanned = {own.name: ScannedTokens(outer, axis) for own, outer, axis in tokens}
        known = {t.name: list(known_shape(t)) for t in step.inputs[self.count :]} | dict(shapes)
        within = {o.name for n in nodes for o in n.outputs} | known.keys()
        needed = _needed(nodes, targets, given)
        for node in needed:
            if not (multiplies(node, within, known) or leaves(node, within, known, outer=True)):
                raise NoMatchError(f"{node.op} is not computed of all tokens")
        lifted = LiftedSteps(f"{self.name}/{step.name}", {**scanned, **given}, known)
        for node in needed:
            lifted.add(node)
        self.scratch += lifted.nodes
        return lifted

    def _step(self, stem: str) -> gs.Graph:
        """Return a copy of the step."""
        body, name = self.loop.attrs["body"], f"{self.name}/{stem}"
        given = [gs.Variable(f"{name}/{t.name}", t.dtype, list(t.shape)) for t in body.inputs]
        nodes, outputs = copy_nodes(body, given, name, self.graph.opset)
        step = gs.Graph(nodes, given, outputs, name=stem, opset=self.graph.opset)
        split_sequence.run(step)
        self.scratch += step.nodes
        return step.cleanup().toposort()

    def _output_axes(self) -> list[int]:
        count = len(self.loop.outputs) - self.count
        return self.loop.attrs.get("scan_output_axes") or [0] * count

    def _proven(
        self, before: Sequence[gs.Node], states: Sequence[gs.Tensor]
    ) -> tuple[list[gs.Node], ProofRecord]:
        """Compare the states of all tokens with those of the loop; return its nodes as well."""
        loop, step = self.loop, self._step("states")
        copies = []
        for tensor in step.outputs[: self.count]:
            copies.append(gs.Variable(f"{tensor.name}/copy", tensor.dtype, tensor.shape))
            step.nodes.append(gs.Node("Identity", copies[-1].name, {}, [tensor], [copies[-1]]))
        step.outputs = [*step.outputs[: self.count], *copies]
        stacked = [
            gs.Variable(f"{t.name}/all", t.dtype, x.shape)
            for t, x in zip(copies, states, strict=True)
        ]
        last = [gs.Variable(f"{t.name}/last", t.dtype, t.shape) for t in copies]
        attrs = {**loop.attrs, "body": step, "scan_output_axes": [0] * self.count}
        own = [gs.Node("Scan", f"{self.name}/states", attrs, list(loop.inputs), [*last, *stacked])]
        front = self._in_front()
        sides: list[tuple[list[gs.Node], gs.Variable]] = []
        for nodes, found in (
            ([*front, *own], stacked),
            ([*front, *before, *self.turns.nodes], states),
        ):
            whole = gs.Variable(f"{self.name}/states/{len(sides)}", found[0].dtype)
            join = gs.Node("Concat", whole.name, {"axis": -1}, list(found), [whole])
            own.append(join)
            sides.append(([*nodes, join], whole))
        try:
            inputs = inputs_of(*(nodes for nodes, _ in sides))
            sized = [(t, self.evaluator.sizes(t)) for t in inputs]
            found_sizes = [(t, sizes) for t, sizes in sized if sizes is not None]
            if len(found_sizes) < len(inputs) or any(t.dtype is None for t in inputs):
                raise ProofFailedError("the type of an input is not known")
            values = {t.name: self.evaluator.values.numbers(t) for t in inputs}
            none: frozenset[str] = frozenset()
            proof = prove(
                RewriteCandidate(
                    inputs=found_sizes,
                    known={name: x for name, x in values.items() if x is not None},
                    positive=none,
                    negative=none,
                    steady=frozenset(values),  # of far larger factors states would leave float32
                    bounded={},
                    channels={},
                    original=sides[0],
                    replacement=sides[1],
                    length=parse(str(self.length)),
                    reach=1,
                    imports=self._imports(),
                )
            )
        finally:
            disconnect(own)
        return [*front, loop], proof

    def _imports(self) -> dict[str, int]:
        found = {o.domain: o.version for o in self.graph.import_domains or ()}
        return {**found, "": self.graph.opset}

    def _in_front(self) -> list[gs.Node]:
        """Return nodes that compute what the loop reads, as far back as the proof goes."""
        found, waiting = dict[int, gs.Node](), list(reads(self.loop))
        while waiting:
            for node in waiting.pop().inputs:
                standard = node.domain in (None, "", "ai.onnx") and node.op in IN_FRONT
                known = node.op in KNOWN_OPERATORS or is_analytic(node, self.data)
                if id(node) not in found and standard and known:
                    found[id(node)] = node
                    waiting += [] if node.op == "Shape" else reads(node)
        return [node for node in self.graph.nodes if id(node) in found]


def _needed(
    nodes: Sequence[gs.Node], targets: Sequence[gs.Tensor], given: Mapping[str, object]
) -> list[gs.Node]:
    """Return the nodes that compute some values where others are given."""
    names = {t.name for t in targets} - given.keys()
    kept: list[gs.Node] = []
    for node in reversed(nodes):
        if any(o.name in names for o in node.outputs):
            kept.insert(0, node)
            names |= {t.name for t in node.inputs} - given.keys()
    return kept
