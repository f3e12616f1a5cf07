"""Matches -> words and a table: what was fused, and how the rewrite was proven."""

from __future__ import annotations

from linexport.manifest import Manifest
from linexport.manifest.matches import MatchRecord, ProofRecord
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import count, error

UPDATE_RULES = {
    "linear": "linear attention",
    "gated": "gated linear attention",
    "delta": "delta rule",
    "gated_delta": "gated delta rule",
    "generalized_delta": "generalised delta rule",
}


def summary(match: MatchRecord) -> str:
    """One match in words: "causal linear attention"."""
    order = "causal" if match.causal else "bidirectional"
    return f"{order} {UPDATE_RULES.get(match.update_rule, match.update_rule)}"


def facts(match: MatchRecord) -> list[tuple[str, str]]:
    """Everything that was read from the nodes, named."""
    return [
        ("Heads", _heads(match)),
        ("Widths", f"{match.d_k} × {match.d_v}"),
        ("Normaliser", f"ε = {match.eps:g}" if match.normalize else "none"),
        ("Scale", f"{match.scale:g}"),
        ("Feature map", _maps(match)),
        ("Key mask", "yes" if match.masked else "none"),
        ("Nodes", f"{len(match.replaced)} became {len(match.added)}"),
        (
            "Proof",
            f"largest relative error {error(match.proof.max_relative_error)}, at "
            f"{_sizes(match.proof)}",
        ),
    ]


def matches(manifest: Manifest) -> Table | None:
    """Each attention that was recognised, what it is, and the error of the proof."""
    rows = [
        [
            Cell(match.where, tone="code"),
            Cell(summary(match), f"{_heads(match)} heads, {match.d_k} × {match.d_v}"),
            Cell(_maps(match)),
            Cell(count(len(match.replaced))),
            Cell(count(len(match.added))),
            Cell(error(match.proof.max_relative_error), f"at {_sizes(match.proof)}"),
        ]
        for match in manifest.matches
    ]
    labels = ["Computes", "Matched", "Feature map", "#Nodes replaced", "#Nodes added"]
    return make_table("Recognised attention", [*labels, "#Largest relative error of proof"], rows)


def _heads(match: MatchRecord) -> str:
    heads = f"{match.q_num_heads} query, {match.kv_num_heads} value"
    return heads if match.key_heads == match.kv_num_heads else f"{heads}, {match.key_heads} key"


def _maps(match: MatchRecord) -> str:
    """Kinds of the feature maps, and the range in which they equal the original nodes."""
    query, key = match.query_map or "as computed", match.key_map or "as computed"
    kinds = query if query == key else f"{query} and {key}"
    if match.map_proven_to is None:
        return kinds
    return f"{kinds}, compared up to |x| = {match.map_proven_to:.2g}"


def _sizes(proof: ProofRecord) -> str:
    return "; ".join(
        ", ".join(f"{name} {size}" for name, size in run.items()) or "its one size"
        for run in proof.sizes
    )
