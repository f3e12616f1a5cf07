"""Where(x > threshold, x, Softplus(x)) -> Softplus(x), for thresholds from 20 on.

PyTorch writes ``softplus`` with such a branch, so as not to compute exp of a large number. Runtimes
compute x + log(1 + exp(-x)), which is x there: log(1 + exp(-20)) is 2e-9, a thousandth of the
distance of 20 to the next float32.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.passes.simplify import made_by, replace

STAGE = "tidy"

THRESHOLD = 20


def run(graph: gs.Graph) -> None:
    """Every such branch on float32 or less."""
    outputs = {id(tensor) for tensor in graph.outputs}
    for node in list(graph.nodes):
        if node.op != "Where" or node.domain or id(node.outputs[0]) in outputs:
            continue
        condition, large, softplus = node.inputs
        greater, smooth = made_by(condition, "Greater"), made_by(softplus, "Softplus")
        if greater is None or smooth is None or smooth.inputs[0] is not large:
            continue
        x, threshold = greater.inputs
        known = isinstance(threshold, gs.Constant) and (threshold.values >= THRESHOLD).all()
        # The branch takes the shape of its threshold, too.
        if known and x is large and threshold.values.size == 1 and _is_single(threshold):
            replace(node, [softplus])


def _is_single(tensor: gs.Constant) -> bool:
    return tensor.values.ndim == 0 and np.dtype(tensor.values.dtype).itemsize <= 4
