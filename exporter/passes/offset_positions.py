"""Positions 0 ... T-1 -> past_length ... past_length + T-1, with past_length an input.

    Range(a, T + a, 1)      becomes  Range(a, T + a, 1) + past_length, a any constant
    table[..., 0:T, ...]    becomes  Gather(table, Range(0, T, 1) + past_length), table a constant
    a sum over positions    becomes  Gather(table, ...), and a line where its table ends
    position + T            becomes  position + (T + past_length), of an output without tokens
    position, an input      becomes  what the first call was given, where it is added to these
    present_length          is       past_length + T

so that a piece of a sequence gets the positions it has in the whole. Gather raises beyond the end
of its table, where a Slice would be short. A Range that picks tokens of the piece itself is left
alone. An output without tokens is that behind the last one: it counts all tokens there were. Zero
begins a sequence, and the graph is then what it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import nodes_behind
from linexport.graph.monomials import Size, parse
from linexport.graph.operators import INDEXING, RESHAPES
from linexport.graph.partial_eval import Values
from linexport.graph.states import LENGTH
from linexport.match.forms.token_sizes import TokenSizes, of_positions
from linexport.match.search.position_tables import CountReader
from linexport.passes.past_length import PastLength, token_source

log = logging.getLogger(__name__)

ADDITIONS = {"Add", "Sub"}


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
    sizes = TokenSizes(length)
    counts = CountReader(graph, sizes).read()
    totals = list(_totals(graph, known, sizes))
    if source is None or not (ranges or slices or counts or totals):
        return PassResult(False)
    sums = [counted.value.inputs[0] for counted in counts]
    firsts = _added_to(graph, [*ranges, *slices, *sums, *(node for node, _ in totals)], sizes)
    past = PastLength(graph, *source)
    for given in firsts:
        past.keep_first(given)
    for counted in counts:
        past.count_on(counted)
    for node in ranges:
        past.offset(node)
    for node in slices:
        axes = known.numbers(node.inputs[3]) if len(node.inputs) > 3 else None
        past.look_up(node, 0 if axes is None else int(axes[0]))
    for node, place in totals:
        past.count_all(node, place)
    found = len(ranges), len(slices), len(counts), len(totals), len(firsts)
    log.info("past_length: %d ranges, %d tables, %d sums, %d totals, %d inputs", *found)
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


def _added_to(graph: gs.Graph, counting: list[gs.Node], sizes: TokenSizes) -> list[gs.Tensor]:
    """Return the inputs without tokens that are added to positions, or to a number of tokens.

    Args:
        graph: before anything is changed.
        counting: the nodes that are to count on.
        sizes: which symbol is the number of tokens.
    """
    counts, changed = of_positions(graph), {id(node) for node in counting}

    def is_added(given: gs.Tensor) -> bool:
        pending, seen = [given], set[int]()
        while pending:
            value = pending.pop()
            for node in value.outputs:
                others = [t for t in node.inputs if t is not value and t.name in counts]
                behind = {id(node), *(id(one) for one in nodes_behind(others))}
                if node.op in ADDITIONS and behind & changed:
                    return True
                if node.op in RESHAPES and node.inputs[0] is value and id(node) not in seen:
                    seen.add(id(node))
                    pending += node.outputs
        return False

    whole = (t for t in graph.inputs if t.dtype in (np.int32, np.int64))
    return [t for t in whole if sizes.lacks(t) and is_added(t)]


def _totals(graph: gs.Graph, known: Values, sizes: TokenSizes) -> Iterator[tuple[gs.Node, int]]:
    """Yield nodes that add T + n to a value, for outputs without tokens alone, and its place."""
    for node in graph.nodes:
        if node.op not in ADDITIONS or known.get(node.outputs[0]) is not None:
            continue
        for place, tensor in enumerate(node.inputs):
            if _is_total(known.get(tensor), sizes) and _has_no_tokens(node, sizes):
                yield node, place


def _is_total(value: np.ndarray | None, sizes: TokenSizes) -> bool:
    """Return whether a value is one number T + n."""
    if value is None or value.size != 1 or not isinstance(value.item(), Size):
        return False
    return sizes.excess(value.item()) is not None


def _has_no_tokens(node: gs.Node, sizes: TokenSizes) -> bool:
    """Return whether no value behind a node has an axis of tokens."""
    seen, pending = set[int](), [node]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if not all(sizes.lacks(made) for made in one.outputs):
            return False
        pending += [behind for made in one.outputs for behind in made.outputs]
    return True


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
