"""The pass -(-x) -> x."""

import logging

from linexport.graph.edit import producer, replace_all_uses_with
from linexport.passes import NoMatchError, Pass, rewrite_matches

log = logging.getLogger("linexport.passes.drop_double_negation")  # seen with -v and -vv


def run(graph):
    """Drop every double negation."""
    return rewrite_matches(graph, inner_value, drop, log)


def inner_value(graph, node):
    """Return x; None where the node is not a candidate."""
    if node.op != "Neg" or not node.inputs:  # disconnected by another pass
        return None
    inner = producer(node.inputs[0], "Neg")
    if inner is None:
        raise NoMatchError("its input is not a negation")
    return inner.inputs[0]


def drop(graph, node, value):
    """Let the consumers of a node read x instead."""
    replace_all_uses_with(node, [value])


PASS = Pass(
    name="drop_double_negation",
    stage="canonicalise",
    ensures="no Neg reads another Neg",
    run=run,
)
