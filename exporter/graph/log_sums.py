"""Log(CumSum(Exp(x))) -> a Scan over tokens that does not overflow.

    y_t = log(exp(y_{t-1}) + exp(x_t)) = max(y_{t-1}, x_t) + log(1 + exp(-|y_{t-1} - x_t|))

The sum overflows from x = 89 on, and vanishes below -104. y_{t-1} is the state of the Scan.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from linexport.graph.builder import NodeBuilder
from linexport.graph.edit import producer
from linexport.graph.tensors import known_shape

LOWEST = -1e30
"""The logarithm of an empty sum: finite, so that differences are."""


def log_sum(node: gs.Node) -> tuple[gs.Tensor, int] | None:
    """Return x and the axis of the sum where a node is its logarithm; None of other nodes.

    Raises:
        ValueError: the sum is one that cannot be rewritten; the text says why.
    """
    cumsum = producer(node.inputs[0], "CumSum") if node.op == "Log" and node.inputs else None
    exp = None if cumsum is None else producer(cumsum.inputs[0], "Exp")
    if cumsum is None or exp is None:
        return None
    x, axis = exp.inputs[0], cumsum.inputs[1]
    if x.dtype != np.float32 or x.shape is None or not isinstance(axis, gs.Constant):
        raise ValueError("its type, rank or axis is not known, or not float32")
    if any(cumsum.attrs.get(name, 0) for name in ("exclusive", "reverse")):
        raise ValueError("it is exclusive or reversed")
    return x, int(axis.values.item()) % len(x.shape)


def write_scan(graph: gs.Graph, node: gs.Node, found: tuple[gs.Tensor, int]) -> None:
    """Have the value of such a logarithm computed by a Scan."""
    (x, axis), (result,) = found, node.outputs
    node.outputs.clear()
    rest = [place for place in range(len(known_shape(x))) if place != axis]
    others = [known_shape(x)[place] for place in rest]

    before, token, last = (
        gs.Variable(f"{result.name}/{name}", np.float32, others)
        for name in ("before", "token", "last")
    )
    step = NodeBuilder(f"{result.name}/step")
    larger = step.op.Max(before, token)
    smaller = step.op.Exp(step.op.Neg(step.op.Abs(step.op.Sub(before, token))))
    # log(e^a + e^b) = max(a, b) + log(1 + e^-|a - b|), of which no exponential overflows.
    after = step.op.Add(larger, step.op.Log(step.op.Add(smaller, 1.0)))
    body = gs.Graph(
        step.nodes,
        [before, token],
        [after, step.op.Identity(after)],
        name=f"{result.name}/token",
        opset=graph.opset,
    )
    outside = NodeBuilder(f"{result.name}/scan")
    kept = outside.op.Gather(outside.op.Shape(x), rest)
    start = outside.op.Expand(np.asarray(LOWEST, np.float32), kept, shape=others)
    attributes = {
        "body": body,
        "num_scan_inputs": 1,
        "scan_input_axes": [axis],
        "scan_output_axes": [axis],
    }
    scan = gs.Node("Scan", node.name, attributes, [start, x], [last, result])
    graph.nodes += [*outside.nodes, scan]


def with_scans(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which no such sum overflows."""
    graph = gs.import_onnx(model)
    for node in list(graph.nodes):
        try:
            found = log_sum(node)
        except ValueError:
            continue
        if found is not None:
            write_scan(graph, node, found)
    return gs.export_onnx(graph.cleanup().toposort(), do_type_check=False)
