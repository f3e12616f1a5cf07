"""Records of matches: what was fused where, by which update rule, and the proof that allowed it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProofRecord:
    """The original nodes compared with the fused ones, on random inputs.

    Attributes:
        sizes: the dynamic sizes of each run, by symbol.
        max_relative_error: over all runs, relative to the largest value of the run.
    """

    sizes: tuple[dict[str, int], ...]
    max_relative_error: float


@dataclass(frozen=True)
class MatchRecord:
    """One linear attention that was fused.

    Attributes:
        where: name of the value that the fused node now computes.
        update_rule: recurrence of the fused node.
        causal: a token attends to itself and those before it.
        normalize: the output is divided by the sum of the weights.
        scale: factor on the scores.
        eps: added to that sum.
        q_num_heads: heads of the query.
        kv_num_heads: heads of the value.
        key_heads: heads of the key.
        d_k: width of a head of query and key.
        d_v: width of a head of the value.
        query_map: kind of the feature map in front of the query; None where the nodes that compute
            the query were kept.
        key_map: the same of the key.
        map_proven_to: the largest |x| up to which that map equals the nodes it stands for: all of
            float32 for elementwise maps and polynomials; None without a map.
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
    proof: ProofRecord
