"""Sums that begin with a given value -> CumulativeSum with that value as its past.

    start + CumulativeSum(x)      becomes      CumulativeSum(x, start)

for a start of no token, such as an input (B, d), where it is added to the last sum as well. The
state of a stream is then the sum with its start, and what later calls are given as a start is not
added again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.builder import NodeBuilder
from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import detach, is_of_weights, is_read, producer
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import element_type
from linexport.passes import first_call
from linexport.plugins.ops import cumulative_sum
from linexport.plugins.ops.op import DOMAIN

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Let every such sum begin with its start."""
    tokens = sequence_axis.symbol(graph)
    if tokens is None:
        return PassResult(False)
    known = Values.of_graph(graph)
    return rewrite_matches(graph, lambda g, n: _match(g, n, tokens, known), _begin, log)


@dataclass(frozen=True)
class _Begun:
    """Sums and what is added to them.

    Attributes:
        sums: the node.
        start: broadcasts to the sums, with one token.
        totals: nodes that add the same to the last of the sums.
    """

    sums: gs.Node
    start: gs.Tensor
    totals: tuple[gs.Node, ...]


def _match(graph: gs.Graph, added: gs.Node, tokens: str, known: Values) -> _Begun | None:
    for sums, start in _parts(added):
        if any(not past.is_empty() for past in sums.inputs[1:]):
            raise NoMatchError("its sums begin with another value")
        if is_of_weights(start) or not first_call.is_given(graph, start, tokens, known):
            raise NoMatchError("what is added to its sums is not given without tokens")
        if any(t.shape is None for t in (start, added.outputs[0], *sums.outputs)):
            raise NoMatchError("the shapes of its sums and of what is added to them are not known")
        own = _token_axis(sums, start)
        if own >= 0 and known_shape(start)[own] != 1:
            raise NoMatchError("what is added to its sums is not one token's")
        if list(known_shape(added.outputs[0])) != list(known_shape(sums.outputs[0])):
            raise NoMatchError("what is added to its sums has more dims, or wider ones")
        return _Begun(sums, start, tuple(_totals(sums, added, start)))
    return None


def _parts(added: gs.Node) -> Iterator[tuple[gs.Node, gs.Tensor]]:
    """Yield sums that a node reads, and what it adds to them, or takes from them."""
    if added.domain or added.op not in ("Add", "Sub") or len(added.inputs) != 2:
        return
    for value, start in (added.inputs, added.inputs[::-1])[: 1 + (added.op == "Add")]:
        sums = producer(value, cumulative_sum.OP.name)
        if sums is not None and sums.domain == DOMAIN and sums.outputs[0] is value:
            yield sums, start


def _axis(sums: gs.Node) -> int:
    """Return the axis of the tokens."""
    return int(sums.attrs.get("axis", cumulative_sum.AXIS))


def _token_axis(sums: gs.Node, start: gs.Tensor) -> int:
    """Return the axis of a start that is that of the tokens; below 0 where it has none."""
    return _axis(sums) - len(known_shape(sums.outputs[0])) + len(known_shape(start))


def _totals(sums: gs.Node, added: gs.Node, start: gs.Tensor) -> Iterator[gs.Node]:
    """Yield the nodes that do to the last of sums what ``added`` does to all of them."""
    if len(sums.outputs) < 2:
        return
    last = sums.outputs[1]
    copies = [copy.outputs[0] for copy in last.outputs if copy.op == "Identity"]
    for value in (last, *copies):
        for node in value.outputs:
            others = [x for x in node.inputs if x is not value]
            in_order = node.op == "Add" or node.inputs[0] is value
            same = [_same_numbers(x) is _same_numbers(start) for x in others] == [True]
            alike = node.op == added.op and in_order and same
            if alike and list(node.outputs[0].shape or ()) == list(known_shape(last)):
                yield node


def _same_numbers(tensor: gs.Tensor) -> gs.Tensor:
    """Return what a tensor is, but for axes of one element."""
    node = producer(tensor)
    moved = node is not None and node.op in ("Identity", "Squeeze", "Unsqueeze")
    return _same_numbers(node.inputs[0]) if node is not None and moved else tensor


def _begin(graph: gs.Graph, added: gs.Node, found: _Begun) -> None:
    old, start, given = found.sums, found.start, found.sums.inputs[0]
    axis, shape = _axis(old), list(known_shape(given))
    builder = NodeBuilder(f"{added.name}/start")
    op, own = builder.op, _token_axis(old, start)
    if own >= 0:
        start = op.Squeeze(start, [own])
    if added.op == "Sub":
        start = op.Neg(start)
    if start.dtype != np.float32:
        start = op.Cast(start, to=element_type(np.dtype(np.float32)))
    del shape[axis]
    if start.shape != shape:
        front, rest = op.Shape(given, end=axis), op.Shape(given, start=axis + 1)
        start = op.Expand(start, op.Concat(front, rest, axis=0), shape=shape)
    result, total = added.outputs[0], gs.Variable(f"{added.name}/total", np.float32, shape)
    copies = [
        gs.Node(
            "Cast", f"{node.name}/total", {"to": element_type(np.dtype(out.dtype))}, [total], [out]
        )
        for node in found.totals
        for out in node.outputs
    ]
    detach([added, *found.totals])
    name = f"{added.name}/sums"
    begun = gs.Node(old.op, name, dict(old.attrs), [given, start], [result, total], domain=DOMAIN)
    graph.nodes += [*builder.nodes, begun, *copies]
    if not any(is_read(graph, value) for value in old.outputs):
        detach([old])


PASS = Pass(
    name="begin_sums",
    stage="stream",
    requires="sums over tokens are nodes of the linexport domain",
    ensures="what is given without tokens is not added to a sum of tokens that begins with zero",
    run=run,
)
