"""x / Sqrt(mean(x^2) + eps) -> x / Sqrt(mean(x^2) + eps) * 1, where no weight follows at once.

ONNX Runtime computes a root mean square norm in one operator if a weight of the width of x follows;
models that normalise groups of channels have a Reshape before theirs. The product with ones is
exact.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.passes.rsqrt_to_div import NARROWEST
from linexport.passes.simplify import made_by

STAGE = "tidy"


def run(graph: gs.Graph) -> None:
    """Every such norm in float32 over a last axis of a known size that is worth it."""
    for node in list(graph.nodes):
        width = _width(node)
        if width is not None and not _weighted(node.outputs[0], width):
            _weigh(graph, node, width)


def _width(node: gs.Node) -> int | None:
    """The size of the last axis, if the node divides by its root mean square."""
    if node.op != "Div" or node.domain or len(node.inputs) != 2:
        return None
    x, divisor = node.inputs
    mean = divisor
    for op in ("Sqrt", "Add"):
        maker = made_by(mean, op)
        if maker is None:
            return None
        given = [t for t in maker.inputs if not isinstance(t, gs.Constant)]
        if len(given) != 1:
            return None
        mean = given[0]
    reduced = made_by(mean, "ReduceMean")
    if reduced is None or not _over_last(reduced, x):
        return None
    squared = made_by(reduced.inputs[0], "Pow")
    if squared is None or squared.inputs[0] is not x:
        return None
    width = x.shape[-1] if x.shape else None
    if not isinstance(width, int) or width < NARROWEST or x.dtype != np.float32:
        return None
    return width


def _over_last(reduced: gs.Node, x: gs.Tensor) -> bool:
    axes = reduced.inputs[1] if len(reduced.inputs) > 1 else None
    if not isinstance(axes, gs.Constant) or not x.shape or not reduced.attrs.get("keepdims", 1):
        return False
    return list(axes.values.flat) in ([-1], [len(x.shape) - 1])


def _weighted(quotient: gs.Tensor, width: int) -> bool:
    """A product with that many numbers is all that it is used for."""
    return len(quotient.outputs) == 1 and any(
        isinstance(t, gs.Constant) and list(t.shape) == [width]
        for t in quotient.outputs[0].inputs
        if quotient.outputs[0].op == "Mul"
    )


def _weigh(graph: gs.Graph, node: gs.Node, width: int) -> None:
    """Let the product take the name of the quotient, which may be an output."""
    output = node.outputs[0]
    quotient = gs.Variable(f"{output.name}/unweighted", output.dtype, output.shape)
    ones = gs.Constant(f"{output.name}/ones", np.ones(width, np.float32))
    node.outputs = [quotient]
    graph.nodes.append(gs.Node("Mul", f"{node.name}/weigh", {}, [quotient, ones], [output]))
