"""The passes of a pipeline on a model: what runs, in which order, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from linexport.graph import surgeon
from linexport.graph.contract import STAGES
from linexport.graph.external_data import Weights
from linexport.graph.findings import Findings, UnmatchedCandidate
from linexport.graph.shapes import completed_shapes
from linexport.manifest.rewriting import PassRecord
from linexport.match.search.obstacles import first_loop, first_obstacle
from linexport.passes import fuse_linear_attention
from linexport.passes.dump import GraphDump
from linexport.passes.manager import run_passes
from linexport.passes.registry import all_passes, target_passes
from linexport.plugins.ops.op import DOMAIN


@dataclass(frozen=True)
class Rewritten:
    """A model after the passes.

    Attributes:
        model: its graph.
        portable: the graph before the passes of the target alone, its large weights external.
        findings: matches and unmatched candidates.
        weights: its external initializers.
        records: of the passes that ran, in order.
    """

    model: onnx.ModelProto
    portable: onnx.ModelProto
    findings: Findings
    weights: Weights
    records: tuple[PassRecord, ...]


def rewrite(
    model: onnx.ModelProto,
    stages: Sequence[str] = STAGES,
    weights: Weights | None = None,
    *,
    dump: GraphDump | None = None,
    stop_after: str | None = None,
    withdrawn: Mapping[str, str] | None = None,
    target: str | None = None,
) -> Rewritten:
    """Apply all passes of the given stages.

    Args:
        model: is not changed.
        stages: some of ``STAGES``.
        weights: values of its external initializers; where given, large weights of the result are
            external as well.
        dump: receives the graph before and after each pass that modified it.
        stop_after: name of the last pass to run; None: all of them.
        withdrawn: attentions to leave as they are, by the value they compute, with the reason.
        target: name of the target whose own passes run at the end; None: none do.

    Raises:
        EnvironmentProblemError: a pass of another package cannot be used.
        BuildError: a pass broke its contract.
    """
    graph = gs.import_onnx(model)
    surgeon.restore_constants(graph, weights or {})
    chosen = [found for stage in stages for found in all_passes() if found.stage == stage]
    chosen += () if target is None else target_passes(target)
    fuse = fuse_linear_attention.without(withdrawn or {})
    chosen = [fuse if found.name == fuse.name else found for found in chosen]
    portable: list[onnx.ModelProto] = []

    def keep(graph: gs.Graph) -> None:
        held = surgeon.externalize_constants(graph)
        portable.append(surgeon.to_model(graph))
        surgeon.restore_constants(graph, held)

    findings, records = run_passes(graph, chosen, dump, stop_after, keep)
    if dump is not None:
        dump.end()
    if "fuse" in stages and not (findings.matches or findings.unmatched or findings.rejected):
        findings = replace(findings, unmatched=_obstacle(model, weights, _fused(graph)))
    external = {} if weights is None else surgeon.externalize_constants(graph)
    result = surgeon.to_model(graph)
    return Rewritten(result, next(iter(portable), result), findings, external, records)


def run(
    model: onnx.ModelProto, stages: Sequence[str] = STAGES, target: str | None = None
) -> onnx.ModelProto:
    """Return the model after all passes of the given stages, and of the target."""
    return rewrite(model, stages, target=target).model


def _fused(graph: gs.Graph) -> bool:
    """Return whether there are ops of linexport, such as convolutions, without a match."""
    return any(node.domain == DOMAIN for node in graph.nodes)


def _obstacle(
    model: onnx.ModelProto, weights: Weights | None, fused: bool
) -> tuple[UnmatchedCandidate, ...]:
    """Return the first thing in the way, in the graph in which attention was looked for.

    Beside ops that were fused without a match, that is a loop over tokens alone.
    """
    searched = rewrite(model, STAGES[:1], weights)
    graph = gs.import_onnx(searched.model)
    surgeon.restore_constants(graph, searched.weights)
    if not fused:
        with completed_shapes(graph):
            found = first_obstacle(graph)
    else:
        found = first_loop(graph)
    return () if found is None else (found,)
