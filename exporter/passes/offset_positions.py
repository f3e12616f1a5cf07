"""Positions 0 ... T-1 -> past_length ... past_length + T-1, with past_length an input.

    Range(a, T + a, 1)      becomes  Range(a, T + a, 1) + past_length, a any constant
    table[..., 0:T, ...]    becomes  Gather(table, Range(0, T, 1) + past_length), table a constant
    a sum over positions    becomes  Gather(table, ...), and a line where its table ends
    present_length          is       past_length + T

so that a piece of a sequence gets the positions it has in the whole. Gather raises beyond the end
of its table, where a Slice would be short. A Range that picks tokens of the piece itself is left
alone. Zero begins a sequence, and the graph is then what it was.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import Pass, PassResult
from linexport.graph.monomials import Size, parse
from linexport.graph.operators import INDEXING
from linexport.graph.partial_eval import Values
from linexport.graph.states import LENGTH
from linexport.match.forms.token_sizes import TokenSizes
from linexport.match.search.position_tables import CountReader
from linexport.passes.past_length import PastLength, token_source

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Offset every position computed from the number of tokens."""
    length = sequence_axis.symbol(graph)
    if length is None or any(name in graph.tensors() for name in LENGTH):
        log.debug("no positions are offset: no token axis is known, or the graph counts itself")
        return PassResult(False)
    known = Values.of_graph(graph)
    tokens = parse(length)
    ranges = [n for n in graph.nodes if n.op == "Range" and _is_position(n, known, tokens)]
    slices = [n for n in graph.nodes if n.op == "Slice" and _heads_table(n, known, tokens)]
    source = token_source(graph, length)
    counts = CountReader(graph, TokenSizes(length)).read()
    if source is None or not (ranges or slices or counts):
        return PassResult(False)
    past = PastLength(graph, *source)
    for counted in counts:
        past.count_on(counted)
    for node in ranges:
        past.offset(node)
    for node in slices:
        axes = known.numbers(node.inputs[3]) if len(node.inputs) > 3 else None
        past.look_up(node, 0 if axes is None else int(axes[0]))
    found = len(ranges), len(slices), len(counts)
    log.info("past_length is added to %d ranges, %d tables and %d sums of positions", *found)
    return PassResult(True)


def _is_position(node: gs.Node, known: Values, counted: Size) -> bool:
    """Return whether a Range counts the tokens, and is not an index into the chunk itself."""
    if not _counts(node, known, counted):
        log.debug("Range %r is left as it is: it does not count the tokens", node.name)
        return False
    if _picks_tokens(node):
        log.debug("Range %r is left as it is: it picks tokens of the piece itself", node.name)
        return False
    return True


def _counts(node: gs.Node, known: Values, counted: Size) -> bool:
    """Return whether a Range is Range(a, T + a, 1)."""
    start, delta = known.numbers(node.inputs[0]), known.numbers(node.inputs[2])
    if start is None or delta is None or start != int(start) or delta != 1:
        return False
    first, end = Size(int(start)), known.get(node.inputs[1])
    return _is(end, counted + first) or _is(end, first + counted)


def _heads_table(node: gs.Node, known: Values, counted: Size) -> bool:
    """Return whether a Slice takes the first T rows of a constant."""
    if not isinstance(node.inputs[0], gs.Constant):
        return False
    start = known.numbers(node.inputs[1])
    rest = [known.numbers(t) for t in node.inputs[3:] if not t.is_empty()]
    if start is None or start.size != 1 or start.item() != 0 or any(r is None for r in rest):
        return False
    return rest[1:] in ([], [1]) and _is(known.get(node.inputs[2]), counted)


def _is(value: np.ndarray | None, size: Size) -> bool:
    return value is not None and value.size == 1 and value.item() == size


def _picks_tokens(node: gs.Node) -> bool:
    """Return whether positions, also after further ops, index a value with a token axis."""
    reached, todo = set(), list(node.outputs)
    while todo:
        value = todo.pop()
        for consumer in value.outputs:
            index = consumer.op in INDEXING and consumer.inputs[1] is value
            if index and not isinstance(consumer.inputs[0], gs.Constant):
                return True
            if not index and consumer.name not in reached and consumer.op not in INDEXING:
                reached.add(consumer.name)
                todo += consumer.outputs
    return False


PASS = Pass(
    name="offset_positions",
    stage="state",
    requires="masks of positions are read: they are not followed through what is added here",
    ensures="positions counted from the number of tokens begin at past_length",
    run=run,
)
