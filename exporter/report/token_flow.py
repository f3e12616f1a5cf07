"""The nodes of a model by what they do along its tokens: in a sentence, and in a table."""

from __future__ import annotations

from linexport.manifest.proof import TokenFlowRecord, TokenNodeRecord
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import count

DOES = {
    "tokenwise": "on each token alone",
    "stateful": "with a state",
    "offset": "offset by the tokens before",
    "window": "looking back by a constant",
    "mixing": "mixing tokens otherwise",
}

NAMED, UNKNOWN = 3, "–"


def sentence(flow: TokenFlowRecord) -> str:
    """Return how many nodes there are of each kind."""
    counts = [(getattr(flow, kind), what) for kind, what in DOES.items()]
    kinds = ", ".join(f"{count(number)} {what}" for number, what in counts if number)
    return f"{kinds or 'no nodes'} (nodes from tokens to outputs)"


def mixing(flow: TokenFlowRecord) -> tuple[TokenNodeRecord, ...]:
    """Return the nodes that mix tokens."""
    return tuple(node for node in flow.nodes if node.kind == "mixing")


def reason(flow: TokenFlowRecord) -> str:
    """Return why a model does not stream: the first nodes that mix tokens, and what would help."""
    nodes = mixing(flow)
    named = "; ".join(_named(node) for node in nodes[:NAMED])
    more = f"; and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    advice = next((f". What would stream: {n.advice}" for n in nodes if n.advice), "")
    return f"{named}{more}{advice}"


def _named(node: TokenNodeRecord) -> str:
    line = f" (in {node.line})" if node.line else ""
    return " ".join(part for part in (node.op, node.node, node.reason) if part) + line


def table(flow: TokenFlowRecord | None) -> Table | None:
    """Return the nodes that look back by a number of tokens, and those that mix tokens."""
    rows = [
        [
            Cell(node.node or UNKNOWN, tone="code"),
            Cell(node.op),
            Cell(node.reason or node.kind, tone="bad" if node.kind == "mixing" else ""),
            Cell(UNKNOWN if node.reach is None else count(node.reach)),
            Cell("all" if node.rows is None else count(node.rows)),
            Cell(node.line or "", tone="code"),
        ]
        for node in (flow.nodes if flow else ())
    ]
    labels = ["Node", "Op", "Along the tokens", "#Looks back", "#Rows", "Line"]
    return make_table("Nodes that look back", labels, rows)
