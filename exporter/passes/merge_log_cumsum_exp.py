"""Log(CumSum(Exp(x - m))) + m, m = ReduceMax(x) -> Log(CumSum(Exp(x))).

PyTorch's ``logcumsumexp`` is exported so, with the maximum of the whole sequence: where that is far
above the first tokens, their sums are 0 and the logarithm -inf. m cancels. Without it the sum can
be matched as a recurrence; what is not matched, ``scan_log_cumsum_exp`` computes without overflow.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import producer

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such sum."""
    return rewrite_matches(graph, _shifted, _merge, log)


def _shifted(graph: gs.Graph, node: gs.Node) -> tuple[gs.Node, gs.Tensor] | None:
    """Return the CumSum of the sum that a node ends, and x."""
    if node.op != "Add" or len(node.inputs) != 2:
        return None
    for logarithm, maximum in (node.inputs, node.inputs[::-1]):
        cumsum = _read(logarithm, "Log", "CumSum")
        reduced = producer(maximum, "ReduceMax")
        if cumsum is None or reduced is None:
            continue
        difference = _read(cumsum.inputs[0], "Exp", "Sub")
        if difference is None or list(difference.inputs) != [reduced.inputs[0], maximum]:
            raise NoMatchError("its exponents are not those that the maximum is of")
        return cumsum, reduced.inputs[0]
    return None


def _read(tensor: gs.Tensor, outer: str, inner: str) -> gs.Node | None:
    node = producer(tensor, outer)
    return None if node is None else producer(node.inputs[0], inner)


def _merge(graph: gs.Graph, node: gs.Node, found: tuple[gs.Node, gs.Tensor]) -> None:
    (cumsum, x), (result,) = found, node.outputs
    node.outputs.clear()

    def like(name: str) -> gs.Variable:
        return gs.Variable(f"{result.name}/{name}", x.dtype, x.shape)

    features, total = like("exp"), like("cumsum")
    graph.nodes += [
        gs.Node("Exp", f"{result.name}/Exp", {}, [x], [features]),
        gs.Node("CumSum", cumsum.name, cumsum.attrs, [features, cumsum.inputs[1]], [total]),
        gs.Node("Log", node.name, {}, [total], [result]),
    ]


PASS = Pass(
    name="merge_log_cumsum_exp",
    stage="canonicalise",
    ensures="no logarithm of a cumulative sum has a maximum added that its exponents lack",
    run=run,
)
