"""Log(Sigmoid(x)) -> Neg(Softplus(Neg(x))), and Pow(Sigmoid(x), c < 1) -> Exp(c Log(Sigmoid(x))).

PyTorch's ``logsigmoid`` is exported as the first. Sigmoid is 0 from x = -104 down, and its
logarithm -inf, so that a gate as closed as that made every later state NaN. Softplus(-x) is -x
there. ONNX Runtime's Sigmoid is the same number from x = -18 down, by processor 0 or 1.5e-8: a root
of it, as gates of slow decay take it (``sigmoid(x) ** (1 / 16)``), is off by up to 0.3.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult, rewrite_matches
from linexport.graph.edit import index_of, producer, with_bodies

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such root, then every such logarithm, in bodies of loops as well."""
    modified = False
    for one in with_bodies(graph):
        modified |= rewrite_matches(one, _root, _as_exponential, log).modified
        modified |= rewrite_matches(one, _argument, _rewrite, log).modified
    return PassResult(modified)


def _root(graph: gs.Graph, node: gs.Node) -> gs.Constant | None:
    """Return c of Pow(Sigmoid(x), c), a number below 1."""
    if node.op != "Pow" or producer(node.inputs[0], "Sigmoid") is None:
        return None
    power = node.inputs[1]
    if not isinstance(power, gs.Constant) or power.values.shape:
        return None
    return power if 0 < power.values.item() < 1 else None


def _as_exponential(graph: gs.Graph, node: gs.Node, power: gs.Constant) -> None:
    (result,) = node.outputs
    logarithm, scaled = (
        gs.Variable(f"{result.name}/{name}", result.dtype, result.shape)
        for name in ("logarithm", "scaled")
    )
    made = [
        gs.Node("Log", logarithm.name, {}, [node.inputs[0]], [logarithm]),
        gs.Node("Mul", scaled.name, {}, [logarithm, power], [scaled]),
    ]
    place = index_of(graph, node)
    graph.nodes[place:place] = made
    node.op, node.inputs = "Exp", [scaled]


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
    place = index_of(graph, node)
    graph.nodes[place:place] = made
    node.op, node.inputs = "Neg", [softplus]


PASS = Pass(
    name="stable_log_sigmoid",
    stage="canonicalise",
    ensures="no Log reads a Sigmoid, and no Pow takes a root of one",
    run=run,
)
