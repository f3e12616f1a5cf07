"""Findings in a graph: matches, unmatched candidates with their reasons, failed proofs."""

from __future__ import annotations

from dataclasses import dataclass, field

from linexport.manifest.matches import MatchRecord


@dataclass(frozen=True)
class UnmatchedCandidate:
    """Nodes that compute something like linear attention and were left as they are.

    Attributes:
        where: name of the value they compute.
        nodes: name of the node that computes it, and of those the reason is about.
        reason: the condition that failed.
    """

    where: str
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RejectedMatch:
    """A match whose proof failed or that was withdrawn: its nodes are what they were."""

    where: str
    reason: str


@dataclass(frozen=True)
class Findings:
    """Everything that was found, in graph order."""

    matches: tuple[MatchRecord, ...] = field(default=())
    unmatched: tuple[UnmatchedCandidate, ...] = field(default=())
    rejected: tuple[RejectedMatch, ...] = field(default=())

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            self.matches + other.matches,
            self.unmatched + other.unmatched,
            # A match that two searches would make is withdrawn once.
            tuple(dict.fromkeys(self.rejected + other.rejected)),
        )
