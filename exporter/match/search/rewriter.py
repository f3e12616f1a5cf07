"""Matches put in place of the nodes that compute them, where both are shown to be equal."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from linexport.graph.findings import RejectedMatch
from linexport.manifest.matches import MatchRecord, ProofRecord
from linexport.match.emit import whole_chunks
from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.candidate import match_record, rewrite_candidate
from linexport.match.emit.operands import Factors
from linexport.match.errors import NotAttentionError
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Leaf
from linexport.match.proof.prove import ProofFailedError, prove
from linexport.match.roles.subgraph import Root, dead_nodes, reads


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
        # Leaves are what the fused node reads, so nothing behind them is replaced.
        stops = {leaf.tensor.name for leaf in leaves}
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
        return tuple(sorted(found.values(), key=lambda n: self.place[id(n)]))

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
            proof = self.swap(root, writer)
        except (NotAttentionError, ProofFailedError) as error:
            withdraw(writer.nodes)
            return error
        replaced = tuple(n.name for n in dead_nodes(root.region, self.outputs))
        self.matches.append(match_record(root, fused, writer, replaced, proof))
        return None

    def swap(self, root: Root, writer: Factors) -> ProofRecord:
        """Have the root computed by nodes that were written.

        Raises:
            ProofFailedError: they compute something else.
        """
        candidate = rewrite_candidate(self.evaluator, self.imports, root, writer)
        proof = prove(candidate)
        self.whole |= whole_chunks.needed_by(self.graph, self.evaluator.values, candidate)
        # Other outputs of the same loop may be matches of their own.
        siblings = [t for t in root.tensor.inputs[0].outputs if t is not root.tensor]
        inside = [t for n in root.region for t in n.outputs]
        self.covered |= {t.name for t in inside if not any(t is o for o in siblings)}
        for node in list(root.tensor.inputs):
            old = gs.Variable(f"{root.tensor.name}/before")
            node.outputs = [old if o is root.tensor else o for o in node.outputs]
        result = writer.result
        if result.inputs and result.inputs[0] in writer.nodes:
            last = result.inputs[0]
            last.outputs = [root.tensor if o is result else o for o in last.outputs]
        self.graph.nodes += writer.nodes
        return proof


def withdraw(nodes: Sequence[gs.Node]) -> None:
    """Detach nodes that were written from the graph, whose tensors list their consumers."""
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()
