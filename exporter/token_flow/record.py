"""Classification of nodes along the tokens -> the record in the manifest."""

from __future__ import annotations

from collections.abc import Callable

from linexport.manifest.proof import TokenFlowRecord, TokenNodeRecord
from linexport.token_flow.classify import Classification, FlowNode
from linexport.token_flow.interpreter import FlowKind

Line = Callable[..., str | None]
"""Gives the source line of the first of some nodes or values that has one."""


def flow_record(found: Classification, line: Line) -> TokenFlowRecord | None:
    """Return the record of a graph's nodes; None of a graph without states."""
    if not found.counts:
        return None
    return TokenFlowRecord(
        **{kind.value: found.counts.get(kind, 0) for kind in FlowKind},
        nodes=tuple(_node(one, line) for one in found.placed),
        reaches=found.reaches,
    )


def _node(one: FlowNode, line: Line) -> TokenNodeRecord:
    kind = one.kind if one.kind in (FlowKind.MIXING, FlowKind.STATEFUL) else FlowKind.WINDOW
    mixes = kind == FlowKind.MIXING
    return TokenNodeRecord(
        node=one.node,
        op=one.op,
        kind=kind.value,
        reach=one.reach,
        rows=one.rows,
        line=line(*one.near),
        reason=one.reason if mixes else None,
        advice=(one.advice or None) if mixes else None,
    )
