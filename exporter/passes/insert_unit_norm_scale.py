"""x / Sqrt(mean(x^2) + eps) -> x / Sqrt(mean(x^2) + eps) * 1, where no weight follows at once.

ONNX Runtime computes a root mean square norm in one operator if a weight of the width of x follows;
models that normalise groups of channels have a Reshape before theirs. The product with ones is
exact.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import producer
from linexport.passes.rsqrt_to_div import NARROWEST

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Scale every such norm in float32 over a last axis of a known size that is worth it."""
    return rewrite_matches(graph, _width, _insert_scale, log)


def _width(graph: gs.Graph, node: gs.Node) -> int | None:
    """Return the size of the last axis, if a node divides by its root mean square."""
    if node.op != "Div" or node.domain or len(node.inputs) != 2:
        return None
    x, divisor = node.inputs
    squares = _mean_of_squares(divisor)
    if squares is None or squares[1] is not x:
        return None
    mean, _ = squares
    if not _over_last_axis(mean, x):
        raise NoMatchError("its mean is not over the last axis, or that axis is dropped")
    width = x.shape[-1] if x.shape else None
    if not isinstance(width, int) or width < NARROWEST:
        raise NoMatchError(f"its rows are {width} wide; the operator pays from {NARROWEST}")
    if x.dtype != np.float32:
        raise NoMatchError(f"its input is {x.dtype}, not float32")
    if _is_scaled(node.outputs[0], width):
        raise NoMatchError("a weight follows already")
    return width


def _mean_of_squares(divisor: gs.Tensor) -> tuple[gs.Node, gs.Tensor] | None:
    """Return the ReduceMean of Sqrt(ReduceMean(x^2) + eps), and x."""
    value = divisor
    for op in ("Sqrt", "Add"):
        node = producer(value, op)
        if node is None:
            return None
        computed = [t for t in node.inputs if not isinstance(t, gs.Constant)]
        if len(computed) != 1:
            return None
        value = computed[0]
    mean = producer(value, "ReduceMean")
    square = None if mean is None else producer(mean.inputs[0], "Pow")
    return None if mean is None or square is None else (mean, square.inputs[0])


def _over_last_axis(mean: gs.Node, x: gs.Tensor) -> bool:
    axes = mean.inputs[1] if len(mean.inputs) > 1 else None
    if not isinstance(axes, gs.Constant) or not x.shape or not mean.attrs.get("keepdims", 1):
        return False
    return list(axes.values.flat) in ([-1], [len(x.shape) - 1])


def _is_scaled(quotient: gs.Tensor, width: int) -> bool:
    """Return whether the quotient's only consumer multiplies it by ``width`` stored numbers."""
    return len(quotient.outputs) == 1 and any(
        isinstance(t, gs.Constant) and list(t.shape) == [width]
        for t in quotient.outputs[0].inputs
        if quotient.outputs[0].op == "Mul"
    )


def _insert_scale(graph: gs.Graph, node: gs.Node, width: int) -> None:
    """Multiply by ones; the product takes the quotient's name, which may be an output's."""
    output = node.outputs[0]
    quotient = gs.Variable(f"{output.name}/unscaled", output.dtype, output.shape)
    ones = gs.Constant(f"{output.name}/ones", np.ones(width, np.float32))
    node.outputs = [quotient]
    graph.nodes.append(gs.Node("Mul", f"{node.name}/scale", {}, [quotient, ones], [output]))


PASS = Pass(
    name="insert_unit_norm_scale",
    stage="tidy",
    ensures="a weight follows every root mean square norm of long float32 rows",
    run=run,
)
