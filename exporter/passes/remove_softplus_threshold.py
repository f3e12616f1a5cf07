"""Where(x > threshold, x, Softplus(x)) -> Softplus(x), for thresholds from 20 on.

PyTorch writes ``softplus`` with such a branch, so as not to compute exp of a large number. Runtimes
compute x + log(1 + exp(-x)), which is x there: log(1 + exp(-20)) is 2e-9, a thousandth of the
distance of 20 to the next float32.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import is_output, producer, replace_all_uses_with

log = logging.getLogger(__name__)

THRESHOLD = 20


def run(graph: gs.Graph) -> PassResult:
    """Remove every such branch on float32 or less."""
    return rewrite_matches(graph, _softplus, _remove, log)


def _softplus(graph: gs.Graph, node: gs.Node) -> gs.Tensor | None:
    """Return the Softplus that a branch makes no difference to."""
    if node.op != "Where" or node.domain:
        return None
    condition, large, smooth = node.inputs
    greater, softplus = producer(condition, "Greater"), producer(smooth, "Softplus")
    if greater is None or softplus is None or softplus.inputs[0] is not large:
        return None
    x, threshold = greater.inputs
    if x is not large:
        return None
    if is_output(graph, node.outputs[0]):
        raise NoMatchError("it computes an output of the graph")
    if not isinstance(threshold, gs.Constant):
        raise NoMatchError("its threshold is not a constant")
    if (threshold.values < THRESHOLD).any():
        raise NoMatchError(f"its threshold is below {THRESHOLD}")
    # The branch takes the shape of its threshold, too.
    if threshold.values.ndim or np.dtype(threshold.values.dtype).itemsize > 4:
        raise NoMatchError("its threshold is not a scalar, or is wider than float32")
    return smooth


def _remove(graph: gs.Graph, node: gs.Node, softplus: gs.Tensor) -> None:
    replace_all_uses_with(node, [softplus])


PASS = Pass(
    name="remove_softplus_threshold",
    stage="tidy",
    ensures=f"no Softplus of float32 or less has a branch for values above {THRESHOLD} or more",
    run=run,
)
