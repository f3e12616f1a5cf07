"""Groups of the states of a Scan that is linear in them: states of a group read each other.

    re' = a re - b im;  im' = b re + a im;  h' = c h + re        groups: {re, im} and {h}

What is read is the state before or after the step, and whatever is computed of it.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind, original_of, producer
from linexport.graph.partial_eval import Values
from linexport.graph.scan_body import is_linear_scan, reached
from linexport.loops.fission import PartedStates, is_plain
from linexport.loops.step_nodes import ARITHMETIC

Group = frozenset[int]


class LinearStates(PartedStates):
    """The states of a Scan that is linear in them, by groups.

    Args:
        scan: the loop.
        values: of the graph that it is in.
    """

    def __init__(self, scan: gs.Node, values: Values) -> None:
        super().__init__(scan)
        self._starts, self._known = scan.inputs[: self.count], values
        reads = dict(enumerate(map(self.states_of, self.body.outputs[: self.count])))
        behind = [reached(reads, place) for place in reads]
        # States that reach each other are a strongly connected component.
        self._group = [
            frozenset({i, *(j for j in behind[i] if i in behind[j])}) for i in range(self.count)
        ]
        self._before = behind

    @property
    def groups(self) -> set[Group]:
        """All groups."""
        return set(self._group)

    def groups_of(self, tensor: gs.Tensor) -> frozenset[Group]:
        """Return the groups that a value is computed of."""
        return frozenset(self._group[i] for i in self.states_of(tensor))

    def reads_others(self, group: Group) -> bool:
        """Return whether the states of a group read any besides each other."""
        return any(self._before[i] - group for i in group)

    def is_recurrence(self, group: Group) -> bool:
        """Return whether a group may be a recurrence that is fused: one state, entry by entry."""
        if len(group) > 1:
            return False
        (place,) = group
        if place not in self.states_of(self.body.outputs[place]):
            return False  # a next state that does not read itself is a delay of others
        behind = nodes_behind([self.body.outputs[place]])
        own = [n for n in behind if any(place in self.states_of(t) for t in n.inputs)]
        return all(node.op in ARITHMETIC for node in own)

    def is_read_begun(self, tensor: gs.Tensor) -> bool:
        """Return whether a value is a state before the step that begins with what is computed."""
        places = [i for i, t in enumerate(self.body.inputs[: self.count]) if t is tensor]
        return not all(map(self._is_begun, places))

    def _is_begun(self, place: int) -> bool:
        """Return whether a state begins with zeros or with a stored state, as operators do."""
        start = self._starts[place]
        return self._known.is_zero(start) or _is_stored(start)

    def is_made_of_one(self, first: Group, node: gs.Node) -> bool:
        """Return whether a node makes values of one that is of some states, entry by entry.

        What a step makes of these states for the next one is whole.
        """
        after = {original_of(self.body.outputs[i]).name for i in first}
        if any(o.name in after for o in node.outputs):
            return False
        of_states = {t.name for t in node.inputs if self.states_of(t)}
        return self.is_made_again(node) or (node.op in ARITHMETIC and len(of_states) == 1)


def read_groups(scan: gs.Node, values: Values) -> LinearStates | None:
    """Return the states of a Scan by groups; None where it is not linear, or has only one."""
    if not is_linear_scan(scan):
        return None
    body: gs.Graph = scan.attrs["body"]
    if not is_plain(body) or any(t.shape is None for t in (*body.inputs, *scan.inputs)):
        return None
    found = LinearStates(scan, values)
    return found if len(found.groups) > 1 else None


def _is_stored(tensor: gs.Tensor) -> bool:
    """Return whether a value is made of stored ones and of sizes."""
    node = producer(tensor)
    if node is None:
        return isinstance(tensor, gs.Constant)
    return node.op == "Shape" or all(_is_stored(t) for t in node.inputs if not t.is_empty())
