"""Findings of ``inspect`` -> one self-contained HTML page with a drawing of each match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from linexport.report.subgraph_drawing import drawing
from linexport.report.text import count, error

WIDEST_PAIR = 1500
"""Units of two drawings side by side; wider ones would be too small to read."""

NAMED = 3

RULES = {
    "linear": "linear attention",
    "gated": "gated linear attention",
    "delta": "delta rule",
    "gated_delta": "gated delta rule",
}


def findings_page(found: Mapping[str, Any]) -> str:
    """The document as text; ``found`` has drawings."""
    environment = Environment(
        loader=PackageLoader("linexport.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    nodes = found["nodes"]
    return environment.get_template("findings.html").render(
        source=found["source"],
        sentence=sentence(found),
        tone="good" if found["matches"] else "open",
        before=count(nodes["traced"]),
        after=count(nodes["rewritten"]),
        matches=[_match(i, m) for i, m in enumerate(found["matches"], 1)],
        misses=[_miss(i, m) for i, m in enumerate(found["near_misses"], 1)],
        refused=found["refused"],
        streaming=streaming(found),
        warnings=found["warnings"],
    )


def sentence(found: Mapping[str, Any]) -> str:
    """The outcome in one sentence."""
    matches, misses = found["matches"], [*found["near_misses"], *found["refused"]]
    own = sum(op["op"] == "LinearAttention" for op in found["ops"]) - len(matches)
    parts = []
    if matches:
        parts.append(f"{len(matches)} linear attention{'s' * (len(matches) != 1)} fused")
    if own > 0:
        parts.append(f"{own} written with linexport")
    if misses:
        parts.append(f"{len(misses)} left as {'it was' if len(misses) == 1 else 'they were'}")
    return f"{', '.join(parts) or 'No linear attention found'}."


def streaming(found: Mapping[str, Any]) -> str:
    """Streaming verdict in words, known before any split is tried."""
    if found["mixing"]:
        return f"prevented by {', '.join(found['mixing'][:NAMED])}"
    causal = any(op["op"] == "LinearAttention" and op.get("causal", 1) for op in found["ops"])
    return "nothing prevents it" if causal else "there is no state to carry"


def summary(match: Mapping[str, Any]) -> str:
    """One match in words: "causal linear attention, 4 heads of 16 × 16"."""
    order = "causal" if match["causal"] else "bidirectional"
    return f"{order} {RULES.get(match['update_rule'], match['update_rule'])}"


def facts(match: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything that was read from the nodes, named."""
    heads = f"{match['q_num_heads']} query, {match['kv_num_heads']} value"
    if match["key_heads"] != match["kv_num_heads"]:
        heads += f", {match['key_heads']} key"
    maps = [match["query_map"] or "as computed", match["key_map"] or "as computed"]
    normaliser = f"ε = {match['eps']:g}" if match["normalize"] else "none"
    proof, proven_to = match["proof"], match["map_proven_to"]
    kinds = maps[0] if maps[0] == maps[1] else f"{maps[0]} and {maps[1]}"
    if proven_to is not None:
        kinds += f", compared up to |x| = {proven_to:.2g}"
    sizes = "; ".join(
        ", ".join(f"{name} {size}" for name, size in run.items()) for run in proof["sizes"]
    )
    return [
        ("Heads", heads),
        ("Widths", f"{match['d_k']} × {match['d_v']}"),
        ("Normaliser", normaliser),
        ("Scale", f"{match['scale']:g}"),
        ("Feature map", kinds),
        ("Key mask", "yes" if match["masked"] else "none"),
        ("Nodes", f"{len(match['replaced'])} became {len(match['added'])}"),
        (
            "Proof",
            f"largest relative error {error(proof['max_relative_error'])}, at {sizes}",
        ),
    ]


def _match(number: int, match: Mapping[str, Any]) -> dict[str, Any]:
    before = drawing(match["before"], f"before-{number}", "The nodes that were found")
    after = drawing(match["after"], f"after-{number}", "What took their place")
    # Columns in proportion to the drawings, which so have one scale.
    beside = before.width + after.width <= WIDEST_PAIR
    return {
        "title": summary(match),
        "where": match["where"],
        "facts": facts(match),
        "before": Markup(before.svg),
        "after": Markup(after.svg),
        "columns": f"{before.width:.0f}fr {after.width:.0f}fr" if beside else "1fr",
    }


def _miss(number: int, miss: Mapping[str, Any]) -> dict[str, Any]:
    part = drawing(miss["before"], f"miss-{number}", "The nodes that were left as they were")
    return {"where": miss["where"], "reason": miss["reason"], "drawing": Markup(part.svg)}
