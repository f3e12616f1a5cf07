"""Log(CumSum(Exp(x))) -> a Scan over tokens that does not overflow, see ``graph.log_sums``.

Sums that are part of a recurrence are fused before this pass runs; this is for the others.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.log_sums import log_sum, write_scan

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such logarithm in float32."""
    return rewrite_matches(graph, _found, write_scan, log)


def _found(graph: gs.Graph, node: gs.Node) -> tuple[gs.Tensor, int] | None:
    try:
        return log_sum(node)
    except ValueError as reason:
        raise NoMatchError(str(reason)) from None


PASS = Pass(
    name="scan_log_cumsum_exp",
    stage="scan",
    ensures="no Log of float32 reads the cumulative sum of an Exp",
    run=run,
)
