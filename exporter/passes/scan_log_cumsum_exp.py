"""Log(CumSum(Exp(x))) -> a Scan over tokens that does not overflow.

    y_t = log(exp(y_{t-1}) + exp(x_t)) = max(y_{t-1}, x_t) + log(1 + exp(-|y_{t-1} - x_t|))

The sum overflows from x = 89 on, and vanishes below -104. Sums that are part of a recurrence are
fused before this pass runs; this is for the others.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.passes.contract import NoMatchError, Pass, PassResult, rewrite_matches

log = logging.getLogger(__name__)

LOWEST = -1e30
"""The logarithm of an empty sum: finite, so that differences are."""


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such logarithm in float32."""
    return rewrite_matches(graph, _exponents, _scan, log)


def _exponents(graph: gs.Graph, node: gs.Node) -> tuple[gs.Tensor, int] | None:
    """Return x and the axis of the sum."""
    cumsum = producer(node.inputs[0], "CumSum") if node.op == "Log" and node.inputs else None
    exp = None if cumsum is None else producer(cumsum.inputs[0], "Exp")
    if cumsum is None or exp is None:
        return None
    x, axis = exp.inputs[0], cumsum.inputs[1]
    if x.dtype != np.float32 or x.shape is None or not isinstance(axis, gs.Constant):
        raise NoMatchError("its type, rank or axis is not known, or not float32")
    if any(cumsum.attrs.get(name, 0) for name in ("exclusive", "reverse")):
        raise NoMatchError("it is exclusive or reversed")
    return x, int(axis.values.item()) % len(x.shape)


def _scan(graph: gs.Graph, node: gs.Node, found: tuple[gs.Tensor, int]) -> None:
    (x, axis), (result,) = found, node.outputs
    node.outputs.clear()
    rest = [place for place in range(len(x.shape)) if place != axis]
    others = [x.shape[place] for place in rest]

    def value(name: str, shape: list[int | str]) -> gs.Variable:
        return gs.Variable(f"{result.name}/{name}", np.float32, shape)

    def number(name: str, number: float) -> gs.Constant:
        return gs.Constant(f"{result.name}/{name}", np.asarray(number, np.float32))

    before, token, after, copy = (value(n, others) for n in ("before", "token", "after", "copy"))
    inner = {
        n: value(n, others) for n in ("larger", "apart", "size", "down", "small", "one", "log")
    }
    body = gs.Graph(
        [
            gs.Node("Max", inputs=[before, token], outputs=[inner["larger"]]),
            gs.Node("Sub", inputs=[before, token], outputs=[inner["apart"]]),
            gs.Node("Abs", inputs=[inner["apart"]], outputs=[inner["size"]]),
            gs.Node("Neg", inputs=[inner["size"]], outputs=[inner["down"]]),
            gs.Node("Exp", inputs=[inner["down"]], outputs=[inner["small"]]),
            gs.Node("Add", inputs=[inner["small"], number("1", 1.0)], outputs=[inner["one"]]),
            gs.Node("Log", inputs=[inner["one"]], outputs=[inner["log"]]),
            gs.Node("Add", inputs=[inner["larger"], inner["log"]], outputs=[after]),
            gs.Node("Identity", inputs=[after], outputs=[copy]),
        ],
        [before, token],
        [after, copy],
        name=f"{result.name}/token",
        opset=graph.opset,
    )
    sizes = gs.Variable(f"{result.name}/sizes", np.int64, [len(x.shape)])
    kept = gs.Variable(f"{result.name}/kept", np.int64, [len(rest)])
    places = gs.Constant(f"{result.name}/places", np.asarray(rest, np.int64))
    start, last = value("start", others), value("last", others)
    attributes = {
        "body": body,
        "num_scan_inputs": 1,
        "scan_input_axes": [axis],
        "scan_output_axes": [axis],
    }
    graph.nodes += [
        gs.Node("Shape", inputs=[x], outputs=[sizes]),
        gs.Node("Gather", inputs=[sizes, places], outputs=[kept]),
        gs.Node("Expand", inputs=[number("lowest", LOWEST), kept], outputs=[start]),
        gs.Node("Scan", node.name, attributes, [start, x], [last, result]),
    ]


PASS = Pass(
    name="scan_log_cumsum_exp",
    stage="tidy",
    ensures="no Log of float32 reads the cumulative sum of an Exp",
    run=run,
)
