"""Running passes in order: each is timed, counted, logged, checked and, on request, dumped.

    canonicalise -> fuse -> stream -> state -> absorb -> tidy -> target

After a pass that modified the graph, nodes it disconnected are removed and the others put in the
order of evaluation, so that the next one sees only what is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs

from linexport.errors import BuildError
from linexport.graph.contract import STATELESS, TARGET, Pass
from linexport.graph.findings import Findings
from linexport.manifest.rewriting import PassRecord
from linexport.passes.dump import GraphDump

log = logging.getLogger(__name__)


def run_passes(
    graph: gs.Graph,
    passes: Sequence[Pass],
    dump: GraphDump | None = None,
    stop_after: str | None = None,
    before_target: Callable[[gs.Graph], None] = lambda graph: None,
) -> tuple[Findings, tuple[PassRecord, ...]]:
    """Run passes on a graph, in place.

    Args:
        graph: changed in place.
        passes: run in this order.
        dump: receives the graph before and after each pass that modified it.
        stop_after: name of the last pass to run; None: all of them.
        before_target: is given the graph before the first pass of a target, if there is one.

    Returns:
        What all passes found, and a record of each.

    Raises:
        BuildError: a pass broke what its contract promises of inputs and outputs.
    """
    findings, records = Findings(), []
    graph.cleanup().toposort()
    if dump is not None:
        dump.begin(graph)
    first = next((found for found in passes if found.stage == TARGET), None)
    for number, found in enumerate(passes, 1):
        if found is first:
            before_target(graph)
        start, before, interface = time.perf_counter(), len(graph.nodes), _interface(graph)
        result = found.run(graph)
        if result.modified:
            graph.cleanup().toposort()
        seconds, after = time.perf_counter() - start, len(graph.nodes)
        records.append(
            PassRecord(found.name, found.stage, round(seconds, 4), before, after, result.modified)
        )
        findings += result.findings
        if result.modified:
            log.info("%s: %d -> %d nodes in %.3f s", found.name, before, after, seconds)
            _check_interface(found, interface, _interface(graph))
            if dump is not None:
                dump.write(number, found, graph)
        else:
            log.debug("%s: nothing to change in %d nodes", found.name, before)
        if found.name == stop_after:
            log.info("stopped after %s", found.name)
            break
    return findings, tuple(records)


def _interface(graph: gs.Graph) -> tuple[list[str], list[str]]:
    """Return the names of a graph's inputs and outputs."""
    return [t.name for t in graph.inputs], [t.name for t in graph.outputs]


def _check_interface(
    found: Pass, before: tuple[list[str], list[str]], after: tuple[list[str], list[str]]
) -> None:
    if found.stage in (*STATELESS, TARGET) and before != after:
        raise BuildError(
            f"The pass {found.name!r} changed the graph's inputs or outputs from {before} to "
            f"{after}; a pass of stage {found.stage!r} must leave them as they are. This is a "
            "fault of the pass: report it to its author."
        )
