"""A source as it would be converted: what is fused, and what is nearly."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import onnx

from linexport import passes, trace
from linexport.graph import states
from linexport.graph.dims import sequence
from linexport.inspection import subgraph
from linexport.inspection.ops import linexport_ops
from linexport.manifest.inspected import FoundCandidate, FoundMatch, GraphPart, SourceInspection
from linexport.manifest.records import UNFOLLOWED, RangeRecord, SourceRecord
from linexport.match.proof.sampling import within
from linexport.sources import load_model
from linexport.token_flow import classify, flow_record

REACH = 7
"""Steps above an unmatched candidate that are drawn: queries, keys and values meet within them."""


def inspect_source(source: object, drawings: bool, **own: Any) -> SourceInspection:
    """Trace a source and look for attention in it; see ``inspect``."""
    loaded, traced = trace.trace_or_whole(load_model(source, run=False, **own))
    decode = loaded.decode_module is not None or bool(traced.states)
    plain = passes.run(traced.model, passes.STATELESS[:1])
    # The states of a decode module are in its graph, whose operations may join tokens with them.
    with within(traced.bounds):
        rewritten = passes.rewrite(traced.model, passes.STATELESS if decode else passes.STAGES)
    findings, given = rewritten.findings, [i.name for i in traced.graph.graph.input]
    held = [*traced.states, *states.find_states(rewritten.model, given)]
    tokens = sequence(traced.dims)
    multiple = 1 if tokens is None else traced.dims[tokens].multiple

    def part(model: onnx.ModelProto, nodes: tuple[str, ...], reach: int = 1) -> GraphPart | None:
        return subgraph.around(model, nodes, reach) if drawings else None

    return SourceInspection(
        source=SourceRecord(**vars(loaded.source)),
        dims={name: RangeRecord(**asdict(limits)) for name, limits in traced.dims.items()},
        traced=len(traced.model.graph.node),
        rewritten=len(rewritten.model.graph.node),
        matches=tuple(
            FoundMatch(m, part(plain, m.replaced), part(rewritten.model, m.added))
            for m in findings.matches
        ),
        unmatched=tuple(
            FoundCandidate(
                c.where,
                c.reason,
                c.nodes,
                traced.line(c.where, *c.nodes),
                part(plain, c.nodes, REACH) if c.nodes else None,
            )
            for c in findings.unmatched
        ),
        rejected=tuple(
            FoundCandidate(m.where, m.reason, (), traced.line(m.where)) for m in findings.rejected
        ),
        token_flow=None
        if any(state.op in UNFOLLOWED for state in traced.states)
        else flow_record(classify(rewritten.model, held, tokens, multiple), traced.line),
        states=tuple(s.record() for s in held),
        ops=linexport_ops(rewritten.model),
        kernels=loaded.kernels,
        warnings=tuple(loaded.warnings),
    )
