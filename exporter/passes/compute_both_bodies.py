"""If with linear attention in a body -> both bodies, and Where to choose between their outputs.

    if c: o = attention(q, k, v)         a = attention(q, k, v),  b = 2 v
    else: o = 2 v                  ->    o = Where(c, a, b)

Ops of linexport are put into the main graph alone, and a state is carried whatever is chosen.
``match.search.speculate_if`` says when both bodies may be computed.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.copies import name_apart
from linexport.match.forms.evaluate import Evaluator
from linexport.match.search.matcher import attention_in
from linexport.match.search.speculate_if import BRANCHES, why_kept

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Let the bodies of every such If be computed in the main graph."""
    result = rewrite_matches(graph, _bodies, _compute_both, log)
    if result.modified:
        graph.toposort()
    return result


def _bodies(graph: gs.Graph, node: gs.Node) -> tuple[gs.Graph, gs.Graph] | None:
    """Return the bodies of an If in which attention is found."""
    if node.op != "If" or node.domain:
        return None
    bodies = [node.attrs[name] for name in BRANCHES]
    outer = Evaluator(graph)
    if not any(attention_in(body, Evaluator(body, outer=outer)) for body in bodies):
        return None
    kept = why_kept(node)
    if kept:
        raise NoMatchError(kept)
    return bodies[0], bodies[1]


def _compute_both(graph: gs.Graph, node: gs.Node, bodies: tuple[gs.Graph, gs.Graph]) -> None:
    """Move the nodes of both bodies, whose values have names that are theirs alone there."""
    for name, body in zip(BRANCHES, bodies, strict=True):
        name_apart(body.nodes, graph, f"{node.name}/{name}")
    graph.nodes += [inner for body in bodies for inner in body.nodes]
    condition, outputs = node.inputs[0], list(node.outputs)
    node.inputs.clear()
    node.outputs.clear()
    chosen = zip(*(body.outputs for body in bodies), outputs, strict=True)
    for place, (one, other, output) in enumerate(chosen):
        where = gs.Node("Where", f"{node.name}/{place}", {}, [condition, one, other], [output])
        graph.nodes.append(where)


PASS = Pass(
    name="compute_both_bodies",
    stage="canonicalise",
    ensures="linear attention is in the main graph where the bodies of its If may both be computed",
    run=run,
)
