"""Groups of states of a linear Scan that read other groups -> a Scan over what these give.

    Scan: g' = a g + x; h' = b h + g'   ->   Scan: g' = a g + x; G     Scan over G: h' = b h + g
    Scan: ...; y = q g + h              ->   Scan: ...; q g, h         Y = Q_g + H

Groups follow each other in the order in which they read. Those that read no other stay together, as
a numerator and its denominator do. What is read before a step, h' = b h + g, crosses over as it is
before the step. Each loop is then a recurrence that recognition can read, and what one gives are
tokens to the next.
"""

from __future__ import annotations

import logging
from functools import partial

import onnx_graphsurgeon as gs

from linexport.graph.contract import rewrite_matches
from linexport.graph.edit import is_read
from linexport.graph.partial_eval import Values
from linexport.loops.delays import delayed_states, give_tokens, given_tokens, shift_tokens
from linexport.loops.fission import Parts, take_apart
from linexport.loops.output_sums import output_sums, split_sums
from linexport.loops.state_components import read_groups
from linexport.loops.step_nodes import keep_outputs, numbers_in
from linexport.passes import hoist_from_scans, sink_from_scans

log = logging.getLogger(__name__)


def separate_states(graph: gs.Graph) -> bool:
    """Give groups of states that are linear Scans of their own; returns whether there were any."""
    modified = False
    while _separate(graph, modified):
        graph.cleanup().toposort()
        for scan in (node for node in graph.nodes if node.op == "Scan"):
            # What leaves it is named after it, and a part of it may have left before.
            scan.name = f"{scan.name or scan.outputs[0].name}/part"
            _drop_unread(graph, scan)
        hoist_from_scans.run(graph)
        sink_from_scans.run(graph)
        rewrite_matches(graph, given_tokens, give_tokens, log)
        graph.cleanup().toposort()
        modified = True
    return modified


def _separate(graph: gs.Graph, begun: bool) -> bool:
    if not any(node.op == "Scan" for node in graph.nodes):
        return False
    values = Values.of_graph(graph)
    return (
        rewrite_matches(graph, partial(delayed_states, values, begun), shift_tokens, log).modified
        or rewrite_matches(graph, partial(_cascade, values), take_apart, log).modified
        or rewrite_matches(graph, partial(output_sums, values), split_sums, log).modified
    )


def _drop_unread(graph: gs.Graph, scan: gs.Node) -> None:
    """Leave out what a Scan gives of every step and nobody reads any longer."""
    states = len(scan.inputs) - scan.attrs["num_scan_inputs"]
    kept = [i for i, t in enumerate(scan.outputs) if i < states or is_read(graph, t)]
    if len(kept) < len(scan.outputs):
        keep_outputs(scan, kept)
        scan.attrs["body"].cleanup().toposort()


def _cascade(values: Values, graph: gs.Graph, scan: gs.Node) -> Parts | None:
    """Return how to split a Scan: the groups that read no other group, and those that read them."""
    known = read_groups(scan, values)
    if known is None:
        return None
    ahead = [group for group in known.groups if not known.reads_others(group)]
    behind = known.groups.difference(ahead)
    if not behind or not any(map(known.is_recurrence, known.groups)):
        return None
    first = frozenset().union(*ahead)
    parts = Parts(first, known.crossing(first, partial(known.is_made_of_one, first)))
    tokens = [*known.body.inputs[known.count :], *known.body.outputs[known.count :]]
    if any(map(known.is_read_begun, parts.crossing)):
        return None
    # Vectors may cross over, and no matrices.
    largest = max((numbers_in([t]) for t in parts.crossing), default=0)
    return parts if largest <= numbers_in(tokens) else None
