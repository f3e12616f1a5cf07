"""Log(Sigmoid(x)) -> Neg(Softplus(Neg(x))).

PyTorch's ``logsigmoid`` is exported so. Sigmoid is 0 from x = -104 down, and its logarithm -inf, so
that a gate as closed as that made every later state NaN. Softplus(-x) is -x there.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.passes.contract import Pass, PassResult, rewrite_matches

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such logarithm."""
    return rewrite_matches(graph, _argument, _rewrite, log)


def _argument(graph: gs.Graph, node: gs.Node) -> gs.Tensor | None:
    """Return x of Log(Sigmoid(x))."""
    sigmoid = producer(node.inputs[0], "Sigmoid") if node.op == "Log" and node.inputs else None
    return None if sigmoid is None else sigmoid.inputs[0]


def _rewrite(graph: gs.Graph, node: gs.Node, x: gs.Tensor) -> None:
    (result,) = node.outputs
    negated, softplus = (
        gs.Variable(f"{result.name}/{name}", result.dtype, result.shape)
        for name in ("negated", "softplus")
    )
    made = [
        gs.Node("Neg", f"{result.name}/Neg", {}, [x], [negated]),
        gs.Node("Softplus", f"{result.name}/Softplus", {}, [negated], [softplus]),
    ]
    # In the logarithm's place: the order of nodes is then that of any order of passes.
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    graph.nodes[place:place] = made
    node.op, node.inputs = "Neg", [softplus]


PASS = Pass(
    name="stable_log_sigmoid",
    stage="canonicalise",
    ensures="no Log reads a Sigmoid",
    run=run,
)
