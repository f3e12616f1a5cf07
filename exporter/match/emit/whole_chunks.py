"""Graphs that take whole chunks of tokens alone, and with fused attention need not.

    16 * (seq // 16)        becomes        seq

Both are equal at every length that the original model accepts. A model that cuts off an incomplete
chunk runs at any length and is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.dims import DIVIDED
from linexport.graph.monomials import Size, parse
from linexport.graph.partial_eval import Values
from linexport.graph.run_subgraph import NotRunnableError, size_value, symbols_in
from linexport.graph.tensors import known_shape
from linexport.match.proof.prove import RewriteCandidate, is_run_at

LARGEST_CHUNK = 1024


def is_whole(size: Size, symbol: str) -> bool:
    """Return whether a size is that of a dimension, or of its whole chunks: 16 * (seq // 16)."""
    return without_chunks(size, symbol) == symbol


def without_chunks(size: Size, symbol: str) -> int | str | None:
    """Return the dimension or the number that a size is wherever chunks are whole.

    None where it is neither.
    """
    if symbols_in(size) != {symbol}:
        return None
    lengths = (DIVIDED, 3 * DIVIDED)
    try:
        # Both lengths are multiples of every usual chunk: there C (n // C) = n.
        found = [size_value(size, {symbol: n}) for n in lengths]
        # Of padded tokens there are more.
        if size_value(size, {symbol: DIVIDED + 1}) > max(DIVIDED + 1, found[0]):
            return None
    except NotRunnableError:
        return None
    if found == list(lengths):
        return symbol
    return found[0] if found[0] == found[1] else None


def needed_by(graph: gs.Graph, values: Values, candidate: RewriteCandidate) -> set[str]:
    """Return the dimensions of which the original nodes of a match take whole chunks alone."""
    given = {s for t in graph.inputs for s in t.shape or () if isinstance(s, str)}
    found, sizes = set(), [candidate.length, *_sizes(graph, values)]
    for symbol in given & symbols_in(candidate.length):
        chunk = _chunk(sizes, symbol)
        # A model that runs at lengths between defines what becomes of incomplete chunks.
        if chunk and not any(is_run_at(candidate, {symbol: n}) for n in (chunk + 1, 3 * chunk - 1)):
            found.add(symbol)
    return found


def _chunk(sizes: list[Size], symbol: str) -> int | None:
    """Return the shortest length above 1 that all sizes of whole chunks are equal to."""
    texts = {str(size): size for size in sizes if symbol in str(size) and str(size) != symbol}
    whole = [size for size in texts.values() if is_whole(size, symbol)]
    if not whole:
        return None
    lengths = range(2, LARGEST_CHUNK + 1)
    return next((n for n in lengths if all(_is(s, symbol, n) for s in whole)), None)


def _is(size: Size, symbol: str, length: int) -> bool:
    try:
        return size_value(size, {symbol: length}) == length
    except NotRunnableError:
        return False


def _sizes(graph: gs.Graph, values: Values) -> Iterator[Size]:
    """Yield sizes that are stated as dims, and those that are values."""
    for tensor in [*graph.inputs, *(o for n in graph.nodes for o in n.outputs)]:
        yield from (parse(size) for size in tensor.shape or () if isinstance(size, str))
        value = _one(values, tensor)
        if value is not None:
            yield value[0]


def _one(values: Values, tensor: gs.Tensor) -> tuple[Size, int] | None:
    """Return a size that is a value, and its rank."""
    value = values.get(tensor)
    if value is None or value.size != 1 or not isinstance(value.item(), Size):
        return None
    return value.item(), value.ndim


def free_lengths(graph: gs.Graph, values: Values, symbols: set[str]) -> None:
    """Have a graph take any number of tokens, where it took whole chunks alone."""
    for symbol in sorted(symbols):
        tensors = [o for n in graph.nodes for o in n.outputs]
        for tensor in tensors:
            size, rank = _one(values, tensor) or (Size(1, (symbol,)), 0)
            freed = without_chunks(size, symbol)
            if tensor.outputs and freed is not None and str(size) != symbol:
                length = _length(graph, symbol, freed, rank, tensor.name)
                for reader in list(tensor.outputs):
                    reader.inputs = [length if t is tensor else t for t in reader.inputs]
        own = [t for t in (*graph.inputs, *graph.outputs) if isinstance(t, gs.Variable)]
        for tensor in (t for t in (*own, *tensors) if t.shape is not None):
            tensor.shape = [_freed(size, symbol) for size in known_shape(tensor)]


def _freed(size: int | str, symbol: str) -> int | str:
    """Return the size of a dim at any length."""
    if not isinstance(size, str) or size == symbol:
        return size
    freed = without_chunks(parse(size), symbol)
    return size if freed is None else freed


def _length(graph: gs.Graph, symbol: str, freed: int | str, rank: int, name: str) -> gs.Tensor:
    """Return the size of a dimension, read from an input, or a number; as a scalar or a vector."""
    if freed != symbol:
        return gs.Constant(f"{name}/number", np.full([1] * rank, freed, np.int64))
    given, place = next(
        (t, i) for t in graph.inputs for i, s in enumerate(known_shape(t)) if s == symbol
    )
    length = gs.Variable(f"{name}/length", np.int64, [1])
    ends = {"start": place, "end": place + 1}
    graph.nodes.append(gs.Node("Shape", f"{name}/Shape", ends, [given], [length]))
    if rank:
        return length
    number = gs.Variable(f"{name}/number", np.int64, [])
    graph.nodes.append(gs.Node("Squeeze", f"{name}/Squeeze", {}, [length], [number]))
    return number
