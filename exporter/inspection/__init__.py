"""Inspection of a model or an artifact: matched attention, unmatched candidates, and ops."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import onnx

from linexport import manifest as manifests
from linexport import passes, trace
from linexport.artifact import opening
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import sequence_axis, states
from linexport.inspection import subgraph
from linexport.loaders import load_model
from linexport.manifest.inspected import (
    ArtifactInspection,
    FoundCandidate,
    FoundMatch,
    GraphPart,
    OpRecord,
    SourceInspection,
)
from linexport.manifest.records import RangeRecord, SourceRecord
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import linexport_nodes

REACH = 7
"""Steps above an unmatched candidate that are drawn: queries, keys and values meet within them."""

UNKNOWN = "of a package that is not installed: the function in the file runs"
WHOLE = "attention and what its operands are computed from"


def inspect(path: str | Path, *, drawings: bool = False) -> SourceInspection | ArtifactInspection:
    """Describe an artifact folder, or a source as it would be converted.

    Args:
        path: the folder or source.
        drawings: with the graph around each match before and after, and around each unmatched
            candidate.

    Returns:
        A record; its ``to_json`` is what ``inspect --json`` prints.

    Raises:
        LinexportError: neither can be read; see ``load_model``, ``trace`` and ``checked_graph``.
    """
    folder = Path(path)
    if manifests.has_manifest(folder):  # a damaged one is an error that says how
        return _artifact(folder)
    loaded = load_model(path, run=False)
    traced, decode = trace.trace(loaded), loaded.decode_module
    plain = passes.run(traced.model, passes.STATELESS[:1])
    # The states of a decode module are in its graph, whose operations may join tokens with them.
    rewritten = passes.rewrite(traced.model, passes.STATELESS if decode else passes.STAGES)
    findings, given = rewritten.findings, [i.name for i in traced.graph.graph.input]
    own = decode.states if decode else ()

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
        mixing=() if decode else tuple(sequence_axis.mixing(rewritten.model)),
        states=tuple(s.record() for s in (*own, *states.find_states(rewritten.model, given))),
        ops=_ops(rewritten.model),
        warnings=tuple(loaded.warnings),
    )


def _artifact(folder: Path) -> ArtifactInspection:
    manifest = manifests.read(folder)
    try:
        model = opening.checked_graph(folder / manifests.MODEL)
    except EnvironmentProblemError as error:
        raise UsageError(f"{folder} cannot be read. {error}") from None
    return ArtifactInspection(manifest, _ops(model))


def _ops(model: onnx.ModelProto) -> tuple[OpRecord, ...]:
    """Return the nodes of linexport's domain, in order, also those whose op is not installed."""
    known = {node.name: (op, seen) for node, op, seen in linexport_nodes(model)}
    records = []
    for node in (n for n in model.graph.node if n.domain == DOMAIN):
        if node.name in known:
            op, seen = known[node.name]
            record = OpRecord(
                node.name, op.name, seen.attributes, op.sizes(seen), op.describe(seen)
            )
        else:
            details = WHOLE if node.op_type == LAYER else UNKNOWN
            record = OpRecord(node.name, node.op_type, {}, {}, details)
        records.append(record)
    return tuple(records)
