"""Zeros that Pad or Concat put in front of a value, behind its cumulative sum or gone.

    CumSum(zeros ++ x)    ->    zeros ++ CumSum(x)
    (zeros ++ x)[n:]      ->    x                     n zeros

Differences of sums over a window are written with a leading zero. So rewritten, they are delays of
one sum.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import END, is_output, producer
from linexport.graph.monomials import Size, parse
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Front:
    """Zeros in front of a value.

    Attributes:
        node: puts them there.
        place: of the value among its inputs.
        axis: along which they are.
        count: of them.
    """

    node: gs.Node
    place: int
    axis: int
    count: int

    @property
    def value(self) -> gs.Tensor:
        """The value behind them."""
        return self.node.inputs[self.place]


def run(graph: gs.Graph) -> PassResult:
    """Rewrite until neither is left."""
    modified = False
    while True:
        known = Values.of_graph(graph)

        def sums(graph: gs.Graph, node: gs.Node, known: Values = known) -> _Front | None:
            return _added_up(graph, node, known)

        def cuts(graph: gs.Graph, node: gs.Node, known: Values = known) -> _Front | None:
            return _cut_off(node, known)

        found = rewrite_matches(graph, sums, _exchange, log).modified
        found |= rewrite_matches(graph, cuts, _undo, log).modified
        if not found:
            return PassResult(modified)
        graph.cleanup().toposort()
        modified = True


def _added_up(graph: gs.Graph, node: gs.Node, known: Values) -> _Front | None:
    """Return the zeros in front of what a CumSum adds up."""
    front = _front(node.inputs[0], known) if node.op == "CumSum" and node.inputs else None
    if front is None:
        return None
    axis, rank = known.numbers(node.inputs[1]), len(known_shape(front.value))
    if axis is None or any(node.attrs.get(n, 0) for n in ("exclusive", "reverse")):
        raise NoMatchError("it does not add up from the first to each")
    if axis.item() % rank != front.axis:
        raise NoMatchError("the zeros are not in front along its axis")
    if len(node.inputs[0].outputs) != 1 or is_output(graph, node.inputs[0]):
        raise NoMatchError("what it adds up is read elsewhere, too")
    return front


def _cut_off(node: gs.Node, known: Values) -> _Front | None:
    """Return the zeros in front that a Slice takes away, and no more than them."""
    front = _front(node.inputs[0], known) if node.op == "Slice" and node.inputs else None
    if front is None:
        return None
    start, end, axes, *steps = [known.get(t) for t in node.inputs[1:]]
    if any(value is None or value.size != 1 for value in (start, end, axes, *steps)):
        raise NoMatchError("it is not a cut along one axis")
    assert start is not None and end is not None and axes is not None
    rank, whole = (
        len(known_shape(front.value)),
        parse(known_shape(front.value)[front.axis]) + Size(front.count),
    )
    last = end.item() if isinstance(end.item(), Size) else Size(int(end.item()))
    to_end = last == whole or (last.known is not None and last.known >= END)
    plain = all(s is not None and s.item() == 1 for s in steps)
    along = axes.item() % rank == front.axis
    if not (along and plain and to_end and start.item() == front.count):
        raise NoMatchError("it does not take away all zeros in front, and those alone")
    return front


def _front(tensor: gs.Tensor, known: Values) -> _Front | None:
    """Return the zeros that a value begins with along one axis."""
    node = producer(tensor)
    if node is None or node.op not in ("Pad", "Concat"):
        return None
    found = _of_pad(node, known) if node.op == "Pad" else _of_concat(node, known)
    shape = None if found is None else found.value.shape
    return None if shape is None or any(size in (None, "") for size in shape) else found


def _of_pad(node: gs.Node, known: Values) -> _Front | None:
    pads, rest = known.numbers(node.inputs[1]), [t for t in node.inputs[2:] if not t.is_empty()]
    constant = node.attrs.get("mode", "constant") == "constant" and len(rest) < 2
    if pads is None or not constant or not all(map(known.is_zero, rest)):
        return None
    axis = int(np.argmax(pads))
    alone = np.count_nonzero(pads) == 1 and pads[axis] > 0 and axis < len(pads) // 2
    return _Front(node, 0, axis, int(pads[axis])) if alone else None


def _of_concat(node: gs.Node, known: Values) -> _Front | None:
    *zeros, value = node.inputs
    shapes = [t.shape for t in (*zeros, value) if t.shape is not None]
    if not zeros or len(shapes) != len(node.inputs) or not all(map(known.is_zero, zeros)):
        return None
    axis = node.attrs["axis"] % len(shapes[0])
    counts = [shape[axis] for shape in shapes[:-1]]
    fixed = [count for count in counts if isinstance(count, int)]
    return _Front(node, len(zeros), axis, sum(fixed)) if len(fixed) == len(counts) else None


def _exchange(graph: gs.Graph, node: gs.Node, front: _Front) -> None:
    (result,), x, pad = node.outputs, front.value, front.node
    sums = gs.Variable(f"{result.name}/sums", x.dtype, x.shape)
    inputs = [sums if i == front.place else t for i, t in enumerate(pad.inputs)]
    rest = node.inputs[1:]
    node.outputs.clear()
    graph.nodes += [
        gs.Node("CumSum", node.name, node.attrs, [x, *rest], [sums]),
        gs.Node(pad.op, f"{result.name}/zeros", pad.attrs, inputs, [result]),
    ]


def _undo(graph: gs.Graph, node: gs.Node, front: _Front) -> None:
    node.op, node.attrs, node.inputs = "Identity", {}, [front.value]


PASS = Pass(
    name="zeros_in_front",
    stage="canonicalise",
    ensures="no CumSum adds up a value that begins with zeros, and no Slice takes just these away",
    run=run,
)
