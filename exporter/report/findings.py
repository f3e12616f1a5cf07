"""Findings of ``inspect`` -> one self-contained HTML page with a drawing of each match."""

from __future__ import annotations

from markupsafe import Markup

from linexport.manifest.inspected import FoundCandidate, FoundMatch, SourceInspection
from linexport.plugins.ops import (
    diagonal_state_space,
    generalized_delta_rule,
    linear_attention,
)
from linexport.report import token_flow
from linexport.report.matches import facts, summary
from linexport.report.page import template
from linexport.report.subgraph_drawing import drawing
from linexport.report.text import count

WIDEST_PAIR = 1500
"""Units of two drawings side by side; wider ones would be too small to read."""

FUSED = {op.OP.name for op in (diagonal_state_space, generalized_delta_rule, linear_attention)}
"""Ops that take the place of a match."""


def findings_page(found: SourceInspection) -> str:
    """Return the document as text; ``found`` has drawings."""
    return template("findings.html").render(
        source=found.source,
        sentence=sentence(found),
        tone="good" if found.matches else "open",
        before=count(found.traced),
        after=count(found.rewritten),
        matches=[_match(i, m) for i, m in enumerate(found.matches, 1)],
        unmatched=[_candidate(i, m) for i, m in enumerate(found.unmatched, 1)],
        rejected=found.rejected,
        streaming=streaming(found),
        warnings=found.warnings,
    )


def sentence(found: SourceInspection) -> str:
    """Return the outcome in one sentence."""
    matches, others = found.matches, [*found.unmatched, *found.rejected]
    own = sum(op.op in FUSED for op in found.ops) - len(matches)
    parts = []
    if matches:
        parts.append(f"{len(matches)} linear attention{'s' * (len(matches) != 1)} fused")
    if own > 0:
        parts.append(f"{own} written with linexport")
    if others:
        parts.append(f"{len(others)} left as {'it was' if len(others) == 1 else 'they were'}")
    return f"{', '.join(parts) or 'No linear attention found'}."


def streaming(found: SourceInspection) -> str:
    """Return in words whether the model can stream, known before any split is tried."""
    if found.token_flow is not None and found.token_flow.mixing:
        return f"prevented: {token_flow.reason(found.token_flow)}"
    return "nothing prevents it" if found.states else "the model has no state"


def _match(number: int, found: FoundMatch) -> dict[str, object]:
    assert found.before is not None and found.after is not None
    before = drawing(found.before, f"before-{number}", "The nodes that were found")
    after = drawing(found.after, f"after-{number}", "What took their place")
    # Columns in proportion to the drawings, which so have one scale.
    side_by_side = before.width + after.width <= WIDEST_PAIR
    return {
        "title": summary(found.match),
        "where": found.match.where,
        "facts": facts(found.match),
        "before": Markup(before.svg),
        "after": Markup(after.svg),
        "columns": f"{before.width:.0f}fr {after.width:.0f}fr" if side_by_side else "1fr",
    }


def _candidate(number: int, one: FoundCandidate) -> dict[str, object]:
    drawn = ""
    if one.before is not None:
        drawn = drawing(
            one.before, f"unmatched-{number}", "The nodes that were left as they were"
        ).svg
    found = {"where": one.where, "reason": one.reason, "line": one.line}
    return {**found, "drawing": Markup(drawn)}
