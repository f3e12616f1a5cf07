"""Outputs of a linear Scan that several groups of states have a share in -> a sum of its outputs.

    Scan: ...; y = q (G + H)               ->     Scan: ...; q G, q H        Y = Q_G + Q_H

A product with a sum is the sum of the products, so that each share is of one group of states and
no larger than the output.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.copies import disconnect
from linexport.graph.edit import index_of, is_read
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.loops.state_components import Group, LinearStates, read_groups
from linexport.loops.step_algebra import StepAlgebra, Terms
from linexport.loops.step_nodes import (
    broadcast,
    give_every_step,
    keep_outputs,
    output_axes,
    with_steps_along,
)

OutputSums = tuple[dict[int, list[gs.Tensor]], list[gs.Node]]
"""Values that add up to an output, by its place, and the nodes that compute them."""


def output_sums(values: Values, graph: gs.Graph, scan: gs.Node) -> OutputSums | None:
    """Return the outputs of a Scan that several groups have a share in; None without any."""
    known = read_groups(scan, values)
    if known is None:
        return None
    step, found = (
        StepAlgebra(known.body, known.body.inputs[: known.count]),
        dict[int, list[gs.Tensor]](),
    )
    for place in range(known.count, len(scan.outputs)):
        if is_read(graph, scan.outputs[place]):
            shares = _shares(known, step, known.body.outputs[place])
            found |= {place: shares} if shares else {}
    if found:
        return found, step.nodes
    disconnect(step.nodes)
    return None


def _shares(known: LinearStates, step: StepAlgebra, output: gs.Tensor) -> list[gs.Tensor] | None:
    """Return the shares of an output, if it has several and one may be fused."""
    groups = sorted(known.groups_of(output), key=min)
    if len(groups) < 2 or not any(map(known.is_recurrence, groups)):
        return None

    made = [t for node in known.body.nodes for t in node.outputs]

    def part(group: Group | None) -> Terms:
        # A value of one group is a share as it is, with what it has of tokens.
        given = {
            t.name: ((1.0, t),) if own == {group} else ()
            for t in (*known.body.inputs, *made)
            if len(own := known.groups_of(t)) == 1
        }
        return step.parts([output], given, added=group is None)[0]

    try:
        shares = [part(group) for group in groups]
        # Addition is commutative: the part of tokens alone may join any share.
        shares[0] += part(None)
    except NoMatchError:
        return None
    found = [step.tensor(terms) for terms in shares if terms]
    ranks = {len(known_shape(t)) for t in (output, *found)}
    return found if len(found) > 1 and len(ranks) == 1 else None


def split_sums(graph: gs.Graph, scan: gs.Node, sums: OutputSums) -> None:
    """Let the Scan give the shares, which are added up behind it."""
    body, count = scan.attrs["body"], len(scan.inputs) - scan.attrs["num_scan_inputs"]
    (found, made), axes = sums, output_axes(scan)
    body.nodes += made
    nodes: list[gs.Node] = []
    for place, shares in found.items():
        whole, *rest = (give_every_step(scan, t, list(known_shape(t)), "share") for t in shares)
        for share in rest:
            added = gs.Variable(f"{share.name}/added", share.dtype)
            added.shape = broadcast((list(known_shape(whole)), list(known_shape(share))))
            nodes.append(gs.Node("Add", added.name, {}, [whole, share], [added]))
            whole = added
        output = scan.outputs[place]
        nodes.append(with_steps_along(axes[place - count], whole, output))
    keep_outputs(scan, [i for i in range(len(scan.outputs)) if i not in found])
    body.cleanup().toposort()
    place = index_of(graph, scan)
    graph.nodes[place + 1 : place + 1] = nodes
