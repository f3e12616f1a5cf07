"""Loop or Scan that runs a known number of times, with attention in its body -> its steps in a row.

    for i in range(3): x = x + attention(x W_i)   ->   x1 = x + attention(x W_0),  x2 = x1 + ..

Such are layers that share a body, as torch's ``while_loop`` and ``scan`` have them. Ops of
linexport are put into the main graph alone, and each attention has a state of its own. The number
of steps is known where the condition follows from constants, step by step, or a Scan takes a fixed
number of slices. Loops over tokens have no such number, and stay. Bodies inside of bodies come
first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.copies import copy_nodes, disconnect, folded, name_constants_apart
from linexport.graph.edit import index_of
from linexport.graph.operators import LOOPS
from linexport.graph.tensors import known_shape
from linexport.loops.token_loops import MOST_STEPS
from linexport.match.forms.evaluate import Evaluator
from linexport.match.search.matcher import attention_in

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Write the steps of every such loop in a row."""
    return PassResult(_run(graph, None))


def _run(graph: gs.Graph, outer: Evaluator | None) -> bool:
    bodies = [a for n in graph.nodes for a in n.attrs.values() if isinstance(a, gs.Graph)]
    if not bodies:
        return False
    evaluator = Evaluator(graph, outer=outer)
    inside = [_run(body, evaluator) for body in bodies]

    def steps(graph: gs.Graph, node: gs.Node) -> _Steps | None:
        return _steps(graph, node, evaluator)

    return rewrite_matches(graph, steps, _write, log).modified or any(inside)


class _Steps:
    """The steps of a loop in a row.

    Attributes:
        nodes: of all steps.
        states: after the last step.
        rows: outputs of each step other than its states.

    Args:
        loop: a Loop or Scan.
        states: before the first step.
        opset: of the graph.
    """

    def __init__(self, loop: gs.Node, states: list[gs.Tensor], opset: int) -> None:
        self.loop, self.opset = loop, opset
        self.name = loop.name or next(o.name for o in loop.outputs if not o.is_empty())
        self.states = [folded(state, opset) for state in states]
        self.nodes: list[gs.Node] = []
        self.rows: list[list[gs.Tensor]] = []
        loop.attrs["body"].toposort()

    def add(
        self, before: Iterable[gs.Tensor], after: Iterable[gs.Tensor], skipped: int
    ) -> list[gs.Tensor]:
        """Add a step; returns what its body gives before its states.

        Args:
            before: inputs of the body before its states.
            after: inputs of the body after its states.
            skipped: outputs of the body before its states.
        """
        name = f"{self.name}/{len(self.rows)}"
        given = [*before, *self.states, *after]
        nodes, made = copy_nodes(self.loop.attrs["body"], given, name, self.opset)
        self.nodes += nodes
        last = skipped + len(self.states)
        self.states = made[skipped:last]
        self.rows.append(made[last:])
        return made[:skipped]

    def stacked(self) -> Iterator[gs.Tensor]:
        """Yield what the steps give, stacked as the loop stacks it."""
        count = len(self.loop.outputs) - len(self.states)
        axes = self.loop.attrs.get("scan_output_axes") or [0] * count
        backwards = self.loop.attrs.get("scan_output_directions") or [0] * count
        for place, axis in enumerate(axes):
            name = f"{self.name}/rows_{place}"
            rows = []
            for step, given in enumerate(self.rows):
                at = gs.Constant(f"{name}/{step}/axis", np.array([axis], np.int64))
                rows.append(gs.Variable(f"{name}/{step}", given[place].dtype))
                self._node("Unsqueeze", {}, [given[place], at], rows[-1])
            whole = gs.Variable(name, rows[0].dtype)
            self._node("Concat", {"axis": axis}, rows[::-1] if backwards[place] else rows, whole)
            yield whole

    def slice(self, tensor: gs.Tensor, axis: int, place: int) -> gs.Tensor:
        """Return one slice of what a Scan takes."""
        name = f"{self.name}/{len(self.rows)}/{tensor.name}"
        at = gs.Constant(f"{name}/place", np.array(place, np.int64))
        sizes = list(known_shape(tensor))
        del sizes[axis]
        found = gs.Variable(name, tensor.dtype, sizes)
        self._node("Gather", {"axis": axis}, [tensor, at], found)
        return found

    def _node(
        self, op: str, attrs: dict[str, int], given: Sequence[gs.Tensor], made: gs.Variable
    ) -> None:
        self.nodes.append(gs.Node(op, made.name, attrs, given, [made]))


def _steps(graph: gs.Graph, node: gs.Node, evaluator: Evaluator) -> _Steps | None:
    """Return the steps of a loop in whose body is attention, or a loop that may be one."""
    if node.op not in LOOPS or node.domain:
        return None
    body = node.attrs["body"]
    looped = any(inner.op in LOOPS for inner in body.nodes)
    if not looped and not attention_in(body, Evaluator(body, outer=evaluator)):
        return None
    is_loop = node.op == "Loop"
    states = node.inputs[2:] if is_loop else node.inputs[: -node.attrs["num_scan_inputs"]]
    steps = _Steps(node, states, graph.opset)
    try:
        (_add_of_loop if is_loop else _add_of_scan)(node, steps)
    except NoMatchError:
        disconnect(steps.nodes)
        raise
    return steps


def _add_of_loop(loop: gs.Node, steps: _Steps) -> None:
    """Add the steps of a Loop, whose condition is followed from one to the next."""
    most, condition = (folded(given, steps.opset) for given in loop.inputs[:2])
    limit = np.inf if most.is_empty() else _known(most)
    going = condition.is_empty() or bool(_known(condition))
    while going and len(steps.rows) < limit:
        step = len(steps.rows)
        if step == MOST_STEPS:
            raise NoMatchError(f"it runs more than {MOST_STEPS} times")
        number = gs.Constant(f"{steps.name}/{step}/number", np.array(step, np.int64))
        true = gs.Constant(f"{steps.name}/{step}/condition", np.array(True))
        (condition,) = steps.add([number, true], [], 1)
        going = len(steps.rows) == limit or bool(_known(condition))
    if not steps.rows and len(loop.outputs) > len(steps.states):
        raise NoMatchError("it never runs, and stacks what its steps give")


def _known(tensor: gs.Tensor) -> float:
    """Return a number that is a constant.

    Raises:
        NoMatchError: it is none.
    """
    if not isinstance(tensor, gs.Constant):
        raise NoMatchError("how often it runs depends on what the graph computes")
    return float(tensor.values.item())


def _add_of_scan(scan: gs.Node, steps: _Steps) -> None:
    """Add the steps of a Scan of a fixed number of slices."""
    count = scan.attrs["num_scan_inputs"]
    scanned = scan.inputs[-count:]
    axes = scan.attrs.get("scan_input_axes") or [0] * count
    backwards = scan.attrs.get("scan_input_directions") or [0] * count
    sizes = {t.shape and t.shape[axis] for t, axis in zip(scanned, axes, strict=True)}
    length = sizes.pop()
    if sizes or not isinstance(length, int) or not 0 < length <= MOST_STEPS:
        raise NoMatchError(f"it takes {length} steps, which is not a number up to {MOST_STEPS}")
    for step in range(length):
        slices = [
            steps.slice(tensor, axis, length - 1 - step if back else step)
            for tensor, axis, back in zip(scanned, axes, backwards, strict=True)
        ]
        steps.add([], slices, 0)


def _write(graph: gs.Graph, loop: gs.Node, steps: _Steps) -> None:
    """Put the steps in the place of a loop."""
    made = [*steps.states, *steps.stacked()]
    name_constants_apart(steps.nodes, graph, steps.name)
    outputs = list(loop.outputs)
    loop.inputs.clear()
    loop.outputs.clear()
    for old, new in zip(outputs, made, strict=True):
        if not old.is_empty():
            steps.nodes.append(gs.Node("Identity", f"{steps.name}/{old.name}", {}, [new], [old]))
    place = index_of(graph, loop)
    graph.nodes[place : place + 1] = steps.nodes


PASS = Pass(
    name="apply_loop_bodies",
    stage="canonicalise",
    ensures="linear attention is in no body of a Loop or Scan that runs a known number of times",
    run=run,
)
