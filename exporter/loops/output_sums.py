"""Outputs of a linear Scan that several groups of states have a share in -> a sum of its outputs.

    Scan: ...; y = q (G + H)               ->     Scan: ...; q G, q H        Y = Q_G + Q_H

A product with a sum is the sum of the products, so that each share is of one group of states and
no larger than the output.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.copies import disconnect
from linexport.graph.dims import Shape
from linexport.graph.edit import index_of, is_read, producer
from linexport.graph.operators import ELEMENTWISE, is_linear
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.loops.state_components import Group, LinearStates, read_groups
from linexport.loops.step_nodes import (
    broadcast,
    give_every_step,
    keep_outputs,
    output_axes,
    with_steps_along,
)

Shares = dict[Group | None, gs.Tensor]
"""Values that add up to another one, by the group that they are of; None: of tokens alone."""


class OutputSums:
    """The outputs of a step that have several shares.

    Args:
        known: the states of the step.

    Attributes:
        found: the shares of each, by its place.
        nodes: what computes them, which is not in the body yet.
    """

    def __init__(self, known: LinearStates) -> None:
        self._known = known
        self._shares: dict[str, Shares | None] = {}
        self.nodes: list[gs.Node] = []
        self.found: dict[int, list[gs.Tensor]] = {}

    def read(self, place: int) -> None:
        """Note the shares of an output, if it has several and one may be fused.

        Raises:
            NoMatchError: the shape of a share is not known.
        """
        output = self._known.body.outputs[place]
        groups = self._known.groups_of(output)
        if len(groups) < 2 or not any(map(self._known.is_recurrence, groups)):
            return
        shares = self._of(output)
        if shares is not None and all(
            len(known_shape(t)) == len(known_shape(output)) for t in shares.values()
        ):
            self.found[place] = self._by_group(shares)

    def _of(self, tensor: gs.Tensor) -> Shares | None:
        """Return the shares of a value; None where an operator is not followed."""
        groups, node = self._known.groups_of(tensor), producer(tensor)
        # A value of one group, or of none, is a share as it is.
        if node is None or len(groups) < 2:
            return {next(iter(groups), None): tensor}
        if tensor.name not in self._shares:
            self._shares[tensor.name] = self._made_by(node)
        return self._shares[tensor.name]

    def _made_by(self, node: gs.Node) -> Shares | None:
        if node.op in ("Add", "Sub"):
            first, second = map(self._of, node.inputs)
            return None if first is None or second is None else self._sum(node.op, first, second)
        taken = [bool(self._known.groups_of(t)) for t in node.inputs]
        # f(G + H) = f(G) + f(H) for an f that is linear in the one operand that has the states.
        if sum(taken) != 1 or len(node.outputs) != 1 or not is_linear(node.op, taken):
            return None
        place = taken.index(True)
        shares = self._of(node.inputs[place])
        return None if shares is None else self._each(node, place, shares)

    def _sum(self, op: str, first: Shares, second: Shares) -> Shares:
        found = dict(first)
        for group, share in second.items():
            if group in found:
                found[group] = self._add(op, [found[group], share])
            else:
                # x - (G + H) = x + (-G) + (-H)
                found[group] = share if op == "Add" else self._add("Neg", [share])
        return found

    def _each(self, node: gs.Node, place: int, shares: Shares) -> Shares | None:
        """Return what an operator makes of each share."""
        whole = list(known_shape(node.inputs[place]))
        elementwise = node.op in ELEMENTWISE
        if not elementwise and any(list(known_shape(t)) != whole for t in shares.values()):
            return None  # of a smaller share it would move or sum other elements
        found: Shares = {}
        for group, share in shares.items():
            inputs = [share if i == place else t for i, t in enumerate(node.inputs)]
            shape = None if elementwise else list(known_shape(node.outputs[0]))
            found[group] = self._add(node.op, inputs, node.attrs, shape, node.outputs[0].dtype)
        return found

    def _by_group(self, shares: Shares) -> list[gs.Tensor]:
        """Return the share of each group; what is of tokens alone is added to the first."""
        found = [share for group, share in shares.items() if group is not None]
        if None in shares:
            # Addition is commutative: the part of tokens alone may join any share.
            found[0] = self._add("Add", [found[0], shares[None]])
        return found

    def _add(
        self,
        op: str,
        inputs: list[gs.Tensor],
        attrs: Mapping[str, object] | None = None,
        shape: Shape | None = None,
        dtype: object = None,
    ) -> gs.Tensor:
        shape = shape or broadcast(list(known_shape(t)) for t in inputs)
        if shape is None:
            raise NoMatchError(f"the shape of {op} of {[t.name for t in inputs]} is not known")
        name = f"{inputs[0].name}/share_{len(self.nodes)}"
        made = gs.Variable(name, dtype or inputs[0].dtype, shape)
        self.nodes.append(gs.Node(op, name, dict(attrs or {}), inputs, [made]))
        return made


def output_sums(values: Values, graph: gs.Graph, scan: gs.Node) -> OutputSums | None:
    """Return the outputs of a Scan that several groups have a share in; None without any."""
    known = read_groups(scan, values)
    if known is None:
        return None
    sums = OutputSums(known)
    try:
        for place in range(known.count, len(scan.outputs)):
            if is_read(graph, scan.outputs[place]):
                sums.read(place)
    except NoMatchError:
        disconnect(sums.nodes)
        raise
    if sums.found:
        return sums
    disconnect(sums.nodes)
    return None


def split_sums(graph: gs.Graph, scan: gs.Node, sums: OutputSums) -> None:
    """Let the Scan give the shares, which are added up behind it."""
    body, count = scan.attrs["body"], len(scan.inputs) - scan.attrs["num_scan_inputs"]
    axes = output_axes(scan)
    body.nodes += sums.nodes
    nodes: list[gs.Node] = []
    for place, shares in sums.found.items():
        whole, *rest = (give_every_step(scan, t, list(known_shape(t)), "share") for t in shares)
        for share in rest:
            added = gs.Variable(f"{share.name}/added", share.dtype)
            added.shape = broadcast((list(known_shape(whole)), list(known_shape(share))))
            nodes.append(gs.Node("Add", added.name, {}, [whole, share], [added]))
            whole = added
        output = scan.outputs[place]
        nodes.append(with_steps_along(axes[place - count], whole, output))
    keep_outputs(scan, [i for i in range(len(scan.outputs)) if i not in sums.found])
    body.cleanup().toposort()
    place = index_of(graph, scan)
    graph.nodes[place + 1 : place + 1] = nodes
