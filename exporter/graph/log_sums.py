"""Log(CumSum(Exp(x))) -> a Scan over tokens that does not overflow.

    y_t = log(exp(y_{t-1}) + exp(x_t)) = max(y_{t-1}, x_t) + log(1 + exp(-|y_{t-1} - x_t|))

The sum overflows from x = 89 on, and vanishes below -104. y_{t-1} is the state of the Scan.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

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
    sizes = gs.Variable(f"{result.name}/sizes", np.int64, [len(known_shape(x))])
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
