"""Findings in a graph: matches, unmatched candidates with their reasons, failed proofs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Proof:
    """The original nodes beside the fused ones, on random inputs.

    Attributes:
        sizes: the dynamic sizes of each run, by symbol.
        max_relative_error: over all runs, relative to the largest value of the run.
    """

    sizes: tuple[dict[str, int], ...]
    max_relative_error: float


@dataclass(frozen=True)
class Match:
    """One linear attention that was fused.

    Attributes:
        where: name of the value that the fused node now computes.
        update_rule, causal, normalize, scale, eps, q_num_heads, kv_num_heads: of the fused node.
        key_heads, d_k, d_v: head counts and widths.
        query_map, key_map: kinds of the feature maps in front; None where whatever computes the
            query or key stays as it was.
        map_proven_to: the largest |x| up to which that map equals the nodes it stands for: all of
            float32 for elementwise maps and polynomials; None where there is no map.
        masked: the fused node takes a key mask.
        replaced: names of the nodes that were removed, in graph order.
        added: names of the nodes that took their place.
        proof: the check that allowed it.
    """

    where: str
    update_rule: str
    causal: bool
    normalize: bool
    scale: float
    eps: float
    q_num_heads: int
    kv_num_heads: int
    key_heads: int
    d_k: int
    d_v: int
    query_map: str | None
    key_map: str | None
    map_proven_to: float | None
    masked: bool
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    proof: Proof

    def json(self) -> dict[str, Any]:
        """Return the JSON value that ``inspect --json`` prints."""
        return asdict(self)


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

    def json(self) -> dict[str, Any]:
        """Return the JSON value that ``inspect --json`` prints."""
        return asdict(self)


@dataclass(frozen=True)
class RejectedMatch:
    """A match whose proof failed or that was withdrawn: its nodes are what they were."""

    where: str
    reason: str

    def json(self) -> dict[str, Any]:
        """Return the JSON value that the manifest holds."""
        return asdict(self)


@dataclass(frozen=True)
class Findings:
    """Everything that was found, in graph order."""

    matches: tuple[Match, ...] = field(default=())
    unmatched: tuple[UnmatchedCandidate, ...] = field(default=())
    rejected: tuple[RejectedMatch, ...] = field(default=())

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            self.matches + other.matches,
            self.unmatched + other.unmatched,
            self.rejected + other.rejected,
        )
