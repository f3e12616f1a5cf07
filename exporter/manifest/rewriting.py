"""Records of what conversion did to the graph: passes, what was left as it was, lowerings."""

from __future__ import annotations

from dataclasses import dataclass

SOFTMAX_ATTENTION = "softmax attention"
"""End of the reason why softmax attention was not fused."""


@dataclass(frozen=True)
class RejectionRecord:
    """Nodes that look like linear attention and were left as they were.

    Attributes:
        where: name of the value they compute.
        reason: the condition that failed.
        nodes: the nodes the reason is about, where known.
        line: the line of the model's source that computes it, "file.py:12: code", where the
            exporter kept it.
    """

    where: str
    reason: str
    nodes: tuple[str, ...] = ()
    line: str | None = None

    @property
    def is_softmax(self) -> bool:
        """Return whether they compute softmax attention."""
        return self.reason.endswith(SOFTMAX_ATTENTION)


@dataclass(frozen=True)
class TunedRecord:
    """Median milliseconds of one candidate lowering."""

    lowering: str
    median_ms: float


@dataclass(frozen=True)
class LoweringRecord:
    """The lowering a node got, and why; ``tuned`` is None where a rule decided."""

    node: str
    op: str
    lowering: str
    reason: str
    tuned: tuple[TunedRecord, ...] | None = None


@dataclass(frozen=True)
class NodesRecord:
    """Numbers of nodes, those of bodies included: of the plain export and of the artifact."""

    exported: int
    artifact: int


@dataclass(frozen=True)
class PassRecord:
    """One run of a pass over the graph.

    Attributes:
        name: of the pass.
        stage: the pass belongs to.
        seconds: it took, with the removal of what it disconnected.
        nodes_before: number of nodes in the graph.
        nodes_after: the same, afterwards.
        changed: whether the pass modified the graph.
    """

    name: str
    stage: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool
