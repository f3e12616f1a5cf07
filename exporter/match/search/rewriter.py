"""Matches put in place of the nodes that compute them, where both are shown to be equal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

import onnx_graphsurgeon as gs

from linexport.graph.edit import detach
from linexport.graph.findings import RejectedMatch
from linexport.manifest.matches import MatchRecord, ProofRecord
from linexport.match.emit import whole_chunks
from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.candidate import match_record, rewrite_candidate
from linexport.match.emit.operands import Factors
from linexport.match.errors import NotAttentionError
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Leaf
from linexport.match.proof.prove import ProofFailedError, RewriteCandidate, prove
from linexport.match.roles.subgraph import Root, dead_nodes, reads
from linexport.match.search.final_states import MAX_TRIED, FinalStates
from linexport.match.search.initial_states import InitialStates

log = logging.getLogger(__name__)


class Rewriter:
    """Replaces in one graph.

    Args:
        graph: changed in place.
        evaluator: of the graph.

    Attributes:
        covered: names of values that matches compute or replace, and of those left alone.
        left: names of the latter, which compute what was rejected.
        matches: those in place.
        rejected: those that are left as they are.
        whole: dimensions of which matches took whole chunks alone.
    """

    def __init__(self, graph: gs.Graph, evaluator: Evaluator) -> None:
        self.graph, self.evaluator = graph, evaluator
        self.place = {id(node): i for i, node in enumerate(graph.nodes)}
        self.outputs = {id(t) for t in graph.outputs}
        self.imports = {o.domain: o.version for o in graph.import_domains or ()}
        self.imports[""] = graph.opset
        self.covered: set[str] = set()
        self.left: set[str] = set()
        self.matches: list[MatchRecord] = []
        self.rejected: list[RejectedMatch] = []
        self.whole: set[str] = set()

    def region(self, root: gs.Tensor, leaves: Sequence[Leaf]) -> tuple[gs.Node, ...]:
        """Return the nodes that compute a value from leaves, in graph order."""
        return self._ordered(self._behind(root, leaves))

    def _ordered(self, nodes: Iterable[gs.Node]) -> tuple[gs.Node, ...]:
        return tuple(sorted(nodes, key=lambda n: self.place[id(n)]))

    def _behind(self, root: gs.Tensor, leaves: Sequence[Leaf]) -> list[gs.Node]:
        # Leaves are what the fused node reads, so nothing behind them is replaced.
        stops = {leaf.tensor.name for leaf in leaves} | {*self.evaluator.initial}
        found: dict[int, gs.Node] = {}
        pending = [root]
        while pending:
            tensor = pending.pop()
            for node in tensor.inputs:
                if id(node) in found or tensor.name in stops:
                    continue
                found[id(node)] = node
                if node.op != "Shape":
                    pending += reads(node)
        return list(found.values())

    def free_lengths(self) -> None:
        """Have the graph take any number of tokens, where matches took whole chunks alone."""
        whole_chunks.free_lengths(self.graph, self.evaluator.values, self.whole)

    def reject_match(self, root: Root, reason: str) -> None:
        """Leave a root and everything inside it as it is."""
        self.rejected.append(RejectedMatch(root.tensor.name, reason))
        self.left |= {t.name for n in root.region for t in n.outputs}
        self.covered |= self.left

    def fuse(self, root: Root, writer: MatchWriter) -> Exception | None:
        """Put the fused node in place, or say why it is not."""
        writer.takes_logarithms = any(node.op == "Log" for node in root.region)
        try:
            fused = writer.write()
            candidate, proof = self._swap_begun(root, writer, fused)
        except (NotAttentionError, ProofFailedError) as error:
            detach(writer.nodes)
            return error
        replaced = tuple(n.name for n in dead_nodes(root.region, self.outputs))
        self.matches.append(match_record(root, fused, writer, replaced, proof))
        self._read_final_states(
            FinalStates(self.graph, self.evaluator, root.roles, fused, candidate, writer.undelayed)
        )
        return None

    def _swap_begun(
        self, root: Root, writer: MatchWriter, fused: gs.Node
    ) -> tuple[RewriteCandidate, ProofRecord]:
        """Have the root computed by a fused node, which takes the states that are given.

        Raises:
            ProofFailedError: it computes something else.
        """
        given = InitialStates(self.evaluator, root.roles, root.region, fused)
        if not given.states:
            return self.swap(root, writer)
        own = list(writer.nodes)
        for begun in islice(given.ways(), MAX_TRIED):
            writer.nodes = [*begun.nodes, *own]
            begun.put()
            try:
                return self.swap(root, writer)
            except ProofFailedError as reason:
                log.debug("%s does not begin so: %s", root.tensor.name, reason)
                begun.take_back()
        writer.nodes = own
        names = ", ".join(t.name for t in given.states)
        raise ProofFailedError(f"it begins with {names}, which the operator does not begin with")

    def _read_final_states(self, states: FinalStates) -> None:
        """Have states behind the last token given by a fused node, where they are states of it."""
        for tensor in states.values():
            nodes = self._behind(tensor, states.roles.leaves)
            if not all(id(node) in self.place for node in nodes):
                continue  # computed of another match
            region = self._ordered(nodes)
            found = states.find(tensor, region)
            if found is not None:
                self._put(tensor, region, found.nodes, found.result)
                self.whole |= self._whole_chunks(found.candidate)
        states.clear_unread()

    def swap(self, root: Root, writer: Factors) -> tuple[RewriteCandidate, ProofRecord]:
        """Have the root computed by nodes that were written.

        Raises:
            ProofFailedError: they compute something else.
        """
        candidate = rewrite_candidate(self.evaluator, self.imports, root, writer)
        proof = prove(candidate)
        self.whole |= self._whole_chunks(candidate)
        self._put(root.tensor, root.region, writer.nodes, writer.result)
        return candidate, proof

    def _whole_chunks(self, candidate: RewriteCandidate) -> set[str]:
        return whole_chunks.needed_by(self.graph, self.evaluator.values, candidate)

    def _put(
        self,
        tensor: gs.Variable,
        region: Sequence[gs.Node],
        nodes: Sequence[gs.Node],
        result: gs.Tensor,
    ) -> None:
        """Have a value computed by nodes that were written, in place of a region."""
        # Other outputs of the same loop may be matches of their own.
        siblings = [t for t in tensor.inputs[0].outputs if t is not tensor]
        inside = [t for n in region for t in n.outputs]
        self.covered |= {t.name for t in inside if not any(t is o for o in siblings)}
        for node in list(tensor.inputs):
            old = gs.Variable(f"{tensor.name}/before")
            node.outputs = [old if o is tensor else o for o in node.outputs]
        if result.inputs and result.inputs[0] in nodes:
            last = result.inputs[0]
            last.outputs = [tensor if o is result else o for o in last.outputs]
        self.graph.nodes += nodes
