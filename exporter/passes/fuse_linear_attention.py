"""Any formulation of linear attention -> FeatureMap and LinearAttention nodes.

    sum_s [s <= t] phi(q_t) . phi(k_s) v_s / (sum_s [s <= t] phi(q_t) . phi(k_s) + eps)

however it is multiplied out, masked, summed, transposed and reshaped; see
``linexport.match``. Each rewrite is proven by running both sides; a rewrite that fails is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult
from linexport.graph.findings import Findings
from linexport.graph.scan_body import is_linear_scan
from linexport.graph.shapes import completed_shapes
from linexport.match.search.by_probing import replace_loops
from linexport.match.search.initial_states import given_states
from linexport.match.search.matcher import Search
from linexport.match.search.row_sums import replace_row_sums
from linexport.match.search.stabilized import replace_stabilized
from linexport.passes import simplify
from linexport.passes.complex_loops import replace_turning_loops
from linexport.passes.scan_cascades import separate_states

log = logging.getLogger(__name__)


def run(graph: gs.Graph, withdrawn: Mapping[str, str] | None = None) -> PassResult:
    """Fuse every match that can be proven and is not withdrawn, see ``without``."""
    with completed_shapes(graph):
        return _fused(graph, withdrawn or {})


def _fused(graph: gs.Graph, withdrawn: Mapping[str, str]) -> PassResult:
    summed = replace_row_sums(graph)
    stabilized = replace_stabilized(graph, withdrawn)
    if summed or stabilized.matches:
        graph.cleanup().toposort()
    found = _search(graph, withdrawn)
    findings = stabilized + found
    # A value fused in front of a loop is a leaf of the loop's form now, which may match then.
    left = math.inf
    while separate_states(graph) or (found.matches and 0 < _linear_loops(graph) < left):
        left = _linear_loops(graph)
        found = _search(graph, withdrawn)
        before = Findings(findings.matches, (), findings.rejected)
        findings = before + found
    for match in findings.matches:
        log.info("%s: %d nodes fused, %s", match.where, len(match.replaced), match.update_rule)
    rejected = [(found.where, found.reason) for found in findings.rejected]
    rejected += [(found.where, found.reason) for found in findings.unmatched]
    for where, reason in rejected:
        log.debug("%s is left as it is: %s", where, reason)
    if findings.matches:
        graph.cleanup().toposort()
        # Several matches may have written the same node, such as the shape of an input.
        simplify.run(graph)
    return PassResult(summed or bool(findings.matches), findings)


def _search(graph: gs.Graph, withdrawn: Mapping[str, str]) -> Findings:
    """Fuse what is linear attention as it stands, that which begins with given states first."""
    given = given_states(graph)
    begun = _search_from(graph, withdrawn, given) if given else Findings()
    found = _search_from(graph, withdrawn) + replace_turning_loops(graph, withdrawn)
    # What is no attention from a given state may be one all the same.
    return Findings(begun.matches) + found


def _search_from(
    graph: gs.Graph, withdrawn: Mapping[str, str], initial: Collection[str] = ()
) -> Findings:
    """Fuse what is linear attention from zeros, or from given states."""
    findings = replace_loops(graph, withdrawn, initial)
    if findings.matches:
        graph.cleanup().toposort()
    findings += Search(graph, withdrawn, initial).run()
    if initial and findings.matches:
        graph.cleanup().toposort()
    return findings


def _linear_loops(graph: gs.Graph) -> int:
    return sum(map(is_linear_scan, graph.nodes))


PASS = Pass(
    name="fuse_linear_attention",
    stage="fuse",
    requires="a simplified graph whose values have known ranks",
    ensures="every linear attention that could be proven is a LinearAttention node",
    run=run,
)


def without(withdrawn: Mapping[str, str]) -> Pass:
    """Return the pass that leaves some matches as they are.

    ``withdrawn`` names them by the value they compute, with the reason that findings are to give.
    """
    return replace(PASS, run=partial(run, withdrawn=withdrawn))
