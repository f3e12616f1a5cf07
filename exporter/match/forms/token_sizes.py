"""Sizes of a graph with the number of tokens as one symbol, and values that follow from sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.dims import DIVIDED
from linexport.graph.monomials import Size, parse
from linexport.graph.operators import SIZES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, size_value, symbols_in

FARTHEST = 1 << 16
"""Tokens: what reaches back further is not read."""

LARGEST = 1 << 26
"""Elements of a value worth computing."""


class TokenSizes:
    """Sizes of a graph in which the number of tokens is one symbol.

    Args:
        tokens: their number, as shapes state it.
    """

    def __init__(self, tokens: str) -> None:
        self.tokens = parse(tokens)
        (self.symbol,) = symbols_in(self.tokens)
        self.unit = size_value(self.tokens, {self.symbol: 1})

    def excess(self, size: Size) -> int | None:
        """Return n of a size T + n; None of another size."""
        if symbols_in(size) != {self.symbol}:
            return None
        found = set()
        # A size T + n differs from T by the same number at both lengths; 2 T, say, does not.
        for number in (DIVIDED, 3 * DIVIDED):
            at = {self.symbol: number}
            try:
                found.add(size_value(size, at) - size_value(self.tokens, at))
            except NotRunnableError:
                return None
        return found.pop() if len(found) == 1 else None

    def axis(self, tensor: gs.Tensor) -> int | None:
        """Return the one axis of a tensor that has the tokens, and none has any other number."""
        sizes = stated_sizes(tensor)
        excess = [] if sizes is None else [self.excess(size) for size in sizes]
        places = [place for place, n in enumerate(excess) if n is not None]
        return places[0] if len(places) == 1 and excess[places[0]] == 0 else None

    def is_pair(self, tensor: gs.Tensor) -> bool:
        """Return whether the last two axes of a tensor are both the tokens."""
        sizes = stated_sizes(tensor) or []
        return len(sizes) > 1 and sizes[-2:] == [self.tokens] * 2

    def is_longer(self, tensor: gs.Tensor) -> bool:
        """Return whether an axis of a tensor has some rows more or fewer than there are tokens."""
        return any(self.excess(size) for size in stated_sizes(tensor) or ())

    def lacks(self, tensor: gs.Tensor) -> bool:
        """Return whether no axis of a tensor follows from the number of tokens."""
        sizes = stated_sizes(tensor)
        return sizes is not None and not any(self.symbol in symbols_in(s) for s in sizes)

    def whole(self, length: int) -> int:
        """Return the shortest number of tokens that a graph takes and is not below another one."""
        return -(-length // self.unit) * self.unit

    def at(self, length: int, tensors: Sequence[gs.Tensor], other: int = 2) -> dict[str, int]:
        """Return a number for each symbol in the sizes of tensors.

        Args:
            length: tokens, at the least.
            tensors: those whose sizes have the symbols.
            other: the number for symbols that are not tokens.
        """
        names = {n for t in tensors for size in stated_sizes(t) or () for n in symbols_in(size)}
        return {**dict.fromkeys(sorted(names), other), self.symbol: -(-length // self.unit)}


def of_positions(graph: gs.Graph) -> set[str]:
    """Return the names of values that depend on sizes and stored values alone."""
    found = set[str]()
    for node in graph.nodes:
        stored = all(
            t.is_empty() or isinstance(t, gs.Constant) or t.name in found for t in node.inputs
        )
        inner = any(isinstance(value, gs.Graph) for value in node.attrs.values())
        if node.op in SIZES_ONLY or (stored and not inner and "Random" not in node.op):
            found |= {o.name for o in node.outputs}
    return found


def imports_of(graph: gs.Graph) -> dict[str, int]:
    """Return the operator sets of a graph."""
    return {**{o.domain: o.version for o in graph.import_domains or ()}, "": graph.opset}


def shape_at(tensor: gs.Tensor, symbols: Mapping[str, int]) -> list[int]:
    """Return the sizes of a tensor for these values of symbols."""
    return [size_value(size, symbols) for size in stated_sizes(tensor) or ()]


def numbers(random: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return random values of a type."""
    kind = np.dtype(dtype)
    if kind == np.dtype(bool):
        return np.asarray(random.random(shape) < 0.5)
    if kind.kind in "iu":
        return random.integers(0, 100, shape).astype(kind)
    return random.standard_normal(shape).astype(kind)


def reach_of(region: Sequence[gs.Node]) -> int | None:
    """Return a bound of the constants that positions are compared with and moved by."""
    total = 0.0
    for node in region:
        values = [t.values for t in node.inputs if isinstance(t, gs.Constant) and t.values.size < 9]
        values += [
            np.asarray(getattr(v, "values", v))
            for v in node.attrs.values()
            if isinstance(v, int | float | list | gs.Constant)
        ]
        for value in values:
            if value.dtype.kind in "iuf":
                whole = np.abs(value.astype(np.float64))
                # Positions are shifted by sums of these constants at the most.
                total += float(whole[whole <= FARTHEST].sum())
    return int(total) if total <= FARTHEST else None
