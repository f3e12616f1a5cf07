"""Records of ``inspect``: what is found in a source before it is converted, or in an artifact.

``to_json`` gives what ``inspect --json`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from linexport.manifest.matches import MatchRecord
from linexport.manifest.proof import TokenFlowRecord
from linexport.manifest.records import (
    KernelRecord,
    Manifest,
    RangeRecord,
    SourceRecord,
    StateRecord,
)
from linexport.manifest.schema import to_json

FROM_MANIFEST = (
    "status",
    "target",
    "source",
    "inputs",
    "outputs",
    "states",
    "dims",
    "nodes",
    "rejected",
    "placement",
    "quantisation",
    "streaming",
    "token_flow",
    "kernels",
)
"""Fields of an artifact's manifest that are printed with its ops."""


@dataclass(frozen=True)
class DrawnNode:
    """A box of a drawn graph.

    Attributes:
        id: name of the node, or "input:NAME" and "output:NAME" of a value of the graph.
        op: its operator; for an input or output, its name.
        note: what distinguishes it from others of its kind: an attribute or a constant; or "".
        shape: of its first output, for people; "" where it is not known.
        role: "inside" the requested nodes, "outside" next to them, "input" or "output".
    """

    id: str
    op: str
    note: str
    shape: str
    role: str


@dataclass(frozen=True)
class GraphPart:
    """The part of a graph around some nodes; an edge is a pair of ids, producer first."""

    nodes: tuple[DrawnNode, ...]
    edges: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FoundMatch:
    """A linear attention that was fused, and the graph around it, where drawings were requested."""

    match: MatchRecord
    before: GraphPart | None = None
    after: GraphPart | None = None

    def to_json(self) -> dict[str, object]:
        """Return the fields of the match, and the drawings where there are any."""
        return asdict(self.match) | _drawn(before=self.before, after=self.after)


@dataclass(frozen=True)
class FoundCandidate:
    """Nodes that compute something like linear attention, and why they were left as they are.

    Attributes:
        where: name of the value they compute.
        reason: the condition that failed.
        nodes: the nodes that the reason is about; empty where a proof failed.
        line: the line of the model's source, where the exporter kept it.
        before: the graph around them, where drawings were requested.
    """

    where: str
    reason: str
    nodes: tuple[str, ...] = ()
    line: str | None = None
    before: GraphPart | None = None

    def to_json(self) -> dict[str, object]:
        """Return the fields that are there."""
        nodes = {"nodes": self.nodes} if self.nodes else {}
        line = {"line": self.line} if self.line else {}
        named = {"where": self.where, **nodes, "reason": self.reason, **line}
        return named | _drawn(before=self.before)


@dataclass(frozen=True)
class OpRecord:
    """A node of a linexport op.

    Attributes:
        node: its name.
        op: name of the op.
        attributes: of the node, by the names of the op's schema.
        sizes: heads and widths that follow from its shapes, by name.
        details: the same in words.
    """

    node: str
    op: str
    attributes: Mapping[str, Any]
    sizes: Mapping[str, int]
    details: str

    def to_json(self) -> dict[str, object]:
        """Return one flat object: attributes and sizes are fields like the names."""
        named = {"node": self.node, "op": self.op}
        return {**named, **self.attributes, **self.sizes, "details": self.details}


@dataclass(frozen=True)
class SourceInspection:
    """A source as it would be converted.

    Attributes:
        source: where it came from.
        dims: its dynamic dimensions by name.
        traced: nodes of the graph before the passes.
        rewritten: nodes after them.
        matches: what was fused.
        unmatched: what looks like linear attention and is not.
        rejected: matches whose proof failed, or that were withdrawn.
        token_flow: what nodes do along the tokens; None of a model without states.
        states: what a call hands to the next.
        ops: nodes of linexport ops after the passes.
        kernels: of GPU libraries that were computed in PyTorch while the source ran.
        warnings: of loading.
    """

    source: SourceRecord
    dims: Mapping[str, RangeRecord]
    traced: int
    rewritten: int
    matches: tuple[FoundMatch, ...]
    unmatched: tuple[FoundCandidate, ...]
    rejected: tuple[FoundCandidate, ...]
    token_flow: TokenFlowRecord | None
    states: tuple[StateRecord, ...]
    ops: tuple[OpRecord, ...]
    kernels: tuple[KernelRecord, ...]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"<SourceInspection of {self.source.location}: {len(self.matches)} fused, "
            f"{len(self.unmatched) + len(self.rejected)} left, {len(self.states)} states>"
        )

    def to_json(self) -> dict[str, object]:
        """Return what ``inspect --json`` prints of a source."""
        return {
            "kind": self.source.kind,
            "source": asdict(self.source),
            "dims": {name: asdict(limits) for name, limits in self.dims.items()},
            "nodes": {"traced": self.traced, "rewritten": self.rewritten},
            "matches": [match.to_json() for match in self.matches],
            "unmatched": [one.to_json() for one in self.unmatched],
            "rejected": [one.to_json() for one in self.rejected],
            "token_flow": None if self.token_flow is None else asdict(self.token_flow),
            "states": [asdict(state) for state in self.states],
            "ops": [op.to_json() for op in self.ops],
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class ArtifactInspection:
    """An artifact: its manifest, and the ops of its graph."""

    manifest: Manifest
    ops: tuple[OpRecord, ...]

    def lowering(self, op: OpRecord) -> str | None:
        """Return the lowering that the manifest names for a node, None where it names none."""
        chosen = {record.node: record.lowering for record in self.manifest.lowerings}
        return chosen.get(op.node)

    def to_json(self) -> dict[str, object]:
        """Return what ``inspect --json`` prints of an artifact."""
        content = to_json(self.manifest)
        ops = [{**op.to_json(), "lowering": self.lowering(op)} for op in self.ops]
        return {"kind": "artifact", **{k: content[k] for k in FROM_MANIFEST}, "ops": ops}


def _drawn(**parts: GraphPart | None) -> dict[str, Any]:
    return {name: asdict(part) for name, part in parts.items() if part is not None}
