"""The last state of a linear Scan that gives every state -> the last of these.

    h_T, H = Scan(h_t = a_t h_{t-1} + b_t)        ->        H = Scan(...),  h_T = H[T - 1]

Otherwise a reader of h_T would keep the loop alive after the recurrence is fused.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult, rewrite_matches
from linexport.graph.edit import index_of, is_read, original_of
from linexport.graph.scan_body import is_linear_scan

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Read last states from all states, where a linear Scan gives these."""
    return rewrite_matches(graph, _given, _gather, log)


def _given(graph: gs.Graph, scan: gs.Node) -> dict[int, int] | None:
    """Return the place of the output with all of a state, by that of its last one."""
    if not is_linear_scan(scan):
        return None
    outputs, count = scan.attrs["body"].outputs, len(scan.inputs) - scan.attrs["num_scan_inputs"]
    read = [i for i in range(count) if is_read(graph, scan.outputs[i])]
    every = {original_of(outputs[i]).name: i for i in range(count, len(outputs))}
    found = {i: every[name] for i in read if (name := original_of(outputs[i]).name) in every}
    return found or None


def _gather(graph: gs.Graph, scan: gs.Node, found: dict[int, int]) -> None:
    count = len(scan.inputs) - scan.attrs["num_scan_inputs"]
    sides = scan.attrs.get("scan_output_axes") or [0] * (len(scan.outputs) - count)
    place = index_of(graph, scan)
    for state, output in found.items():
        last, every = scan.outputs[state], scan.outputs[output]
        scan.outputs[state] = gs.Variable(f"{last.name}/unread", last.dtype, last.shape)
        index = gs.Constant(f"{last.name}/index", np.asarray(-1, np.int64))
        attrs = {"axis": sides[output - count]}
        node = gs.Node("Gather", f"{last.name}/Gather", attrs, [every, index], [last])
        graph.nodes.insert(place + 1, node)


PASS = Pass(
    name="last_states",
    stage="canonicalise",
    ensures="the last state of a linear Scan is read from all states where it gives these",
    run=run,
)
