"""Log(Exp(a) + Exp(b)) -> Max(a, b) + Softplus(-|a - b|), or Softplus(b) where a is 0.

PyTorch's ``logaddexp`` is exported as the first: infinite from 89 on and -inf below -104, where
gates that are divided by their sum in log space, f - logaddexp(f, i), become NaN. Exp of a number
is that number there: Zipformer's logaddexp(0, x - 4) is Log(1 + Exp(x - 4)).
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
    terms = [] if total is None else [_logarithm(x, node.name) for x in total.inputs]
    found = [x for x in terms if x is not None]
    if len(found) != 2 or all(isinstance(x, gs.Constant) for x in found):
        return None
    if node.outputs[0].dtype not in (np.float32, np.float16):
        raise NoMatchError("its type is not known, or neither float32 nor float16")
    return found


def _logarithm(term: gs.Tensor, name: str) -> gs.Tensor | None:
    """Return a of Exp(a), or of a constant that is Exp(a)."""
    exp = producer(term, "Exp")
    if exp is not None:
        return exp.inputs[0]
    if not isinstance(term, gs.Constant) or not (term.values > 0).all():
        return None
    return gs.Constant(f"{name}/logarithm", np.asarray(np.log(term.values)))


def _rewrite(graph: gs.Graph, node: gs.Node, found: list[gs.Tensor]) -> None:
    constant = next((x for x in found if isinstance(x, gs.Constant)), None)
    if constant is not None and constant.values.ndim == 0 and constant.values == 0:
        node.op, node.inputs = "Softplus", [x for x in found if x is not constant]
        return
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
