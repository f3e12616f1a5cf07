"""Log(Exp(a) + Exp(b)) -> Max(a, b) + Softplus(-|a - b|).

PyTorch's ``logaddexp`` is exported as the first: infinite from 89 on and -inf below -104, where
gates that are divided by their sum in log space, f - logaddexp(f, i), become NaN.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import index_of, producer, with_bodies

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such logarithm, in bodies of loops as well."""
    done = [rewrite_matches(one, _arguments, _rewrite, log) for one in with_bodies(graph)]
    return PassResult(any(result.modified for result in done))


def _arguments(graph: gs.Graph, node: gs.Node) -> list[gs.Tensor] | None:
    """Return a and b."""
    total = producer(node.inputs[0], "Add") if node.op == "Log" and node.inputs else None
    exps = [] if total is None else [producer(x, "Exp") for x in total.inputs]
    found = [exp.inputs[0] for exp in exps if exp is not None]
    if len(found) != 2:
        return None
    if node.outputs[0].dtype not in (np.float32, np.float16):
        raise NoMatchError("its type is not known, or neither float32 nor float16")
    return found


def _rewrite(graph: gs.Graph, node: gs.Node, found: list[gs.Tensor]) -> None:
    (result,) = node.outputs
    made = list[gs.Node]()

    def value(op: str, *inputs: gs.Tensor, dtype: type = result.dtype) -> gs.Variable:
        output = gs.Variable(f"{result.name}/{op.lower()}", dtype, result.shape)
        made.append(gs.Node(op, f"{result.name}/{op}", {}, list(inputs), [output]))
        return output

    zero = gs.Constant(f"{result.name}/zero", np.zeros((), result.dtype))
    # The difference of equal infinities is NaN, where that of equal numbers is 0.
    same = value("Equal", *found, dtype=np.bool_)
    difference = value("Where", same, zero, value("Sub", *found))
    small = value("Softplus", value("Neg", value("Abs", difference)))
    larger = value("Max", *found)
    place = index_of(graph, node)
    graph.nodes[place:place] = made
    node.op, node.inputs = "Add", [larger, small]


PASS = Pass(
    name="stable_log_add_exp",
    stage="canonicalise",
    ensures="no Log reads the sum of two Exp",
    run=run,
)
