"""Values of positions alone, as tables that go on as a line.

    v_p = table_p for p < n,   and   v_p = v_{n-1} + slope (p - n + 1) from there on

such as how many tokens a window has, or a sum of a triangle's rows: sums over positions, which are
found by running the nodes that compute them, at lengths beyond every constant in them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind
from linexport.graph.operators import ELEMENTWISE, LAYOUT, SIZES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, session, symbols_in
from linexport.graph.tensors import computed_value
from linexport.match.emit.candidate import inputs_of
from linexport.match.forms.token_sizes import (
    LARGEST,
    TokenSizes,
    imports_of,
    of_positions,
    reach_of,
    shape_at,
)

log = logging.getLogger(__name__)

EACH_ALONE = ELEMENTWISE | LAYOUT | SIZES_ONLY | {"Range"}
"""Operators that give each position what is computed of it alone."""


@dataclass(frozen=True)
class Counted:
    """A value of positions.

    Attributes:
        value: the value.
        axis: of the positions.
        table: its first entries, as many as until it goes on as a line.
        slope: of the line; positions are a dim of size 1.
    """

    value: gs.Variable
    axis: int
    table: np.ndarray
    slope: np.ndarray


class CountReader:
    """Finds such values in a graph.

    Args:
        graph: its nodes are in order.
        sizes: which symbol is the number of tokens.
    """

    def __init__(self, graph: gs.Graph, sizes: TokenSizes) -> None:
        self.graph, self.sizes = graph, sizes
        self._positions, self._imports = of_positions(graph), imports_of(graph)
        self._place = {id(node): i for i, node in enumerate(graph.nodes)}
        self._outputs = {id(t) for t in graph.outputs}
        self._held = self._of_states()

    def read(self) -> list[Counted]:
        """Return the values that sum over positions and are read with tokens."""
        found: dict[str, Counted | None] = {}
        for tensor in self._read_with_tokens():
            self._try(tensor, found)
        return [counted for counted in found.values() if counted is not None]

    def _read_with_tokens(self) -> Iterator[gs.Tensor]:
        for node in self.graph.nodes:
            for tensor in node.outputs:
                outside = any(r.outputs[0].name not in self._positions for r in tensor.outputs)
                if tensor.name in self._positions and (outside or id(tensor) in self._outputs):
                    yield tensor

    def _try(self, tensor: gs.Tensor, found: dict[str, Counted | None]) -> None:
        """Read a value; where it is not one, those that it is computed of."""
        if tensor.name in found or tensor.name not in self._positions:
            return
        nodes = self._behind(tensor)
        if not any(map(self._mixes, nodes)):
            return
        found[tensor.name] = None
        if self.sizes.axis(tensor) is not None and not any(map(self._counts_rows, nodes)):
            found[tensor.name] = self._run(computed_value(tensor), nodes)
        if found[tensor.name] is None:
            for given in tensor.inputs[0].inputs if tensor.inputs else ():
                self._try(given, found)

    def _mixes(self, node: gs.Node) -> bool:
        """Return whether a node may give a position what is of others."""
        sizes = (size for t in node.inputs for size in stated_sizes(t) or ())
        return node.op not in EACH_ALONE and any(self.sizes.symbol in symbols_in(s) for s in sizes)

    def _of_states(self) -> set[str]:
        """Return the names of values that are computed of inputs without an axis of the tokens."""
        found = {
            given.name
            for given in self.graph.inputs
            if not any(self.sizes.symbol in symbols_in(s) for s in stated_sizes(given) or ())
        }
        for node in self.graph.nodes:
            if any(t.name in found for t in node.inputs):
                found |= {t.name for t in node.outputs}
        return found

    def _counts_rows(self, node: gs.Node) -> bool:
        """Return whether a node reads how many tokens there are with the rows of a state.

        Such a number says where a row is in this call, not in the sequence.
        """
        if node.op not in SIZES_ONLY or node.inputs[0].name not in self._held:
            return False
        sizes = stated_sizes(node.inputs[0]) or ()
        mixed = any(self.sizes.symbol in symbols_in(size) for size in sizes)
        return mixed and self.sizes.axis(node.inputs[0]) is None

    def _behind(self, tensor: gs.Tensor) -> list[gs.Node]:
        """Return the nodes that compute a value of sizes, in order."""
        return sorted(nodes_behind([tensor], SIZES_ONLY), key=lambda n: self._place[id(n)])

    def _run(self, tensor: gs.Variable, nodes: Sequence[gs.Node]) -> Counted | None:
        reach, given, axis = reach_of(nodes), inputs_of(nodes), self.sizes.axis(tensor)
        if reach is None or axis is None:
            return None
        if any(stated_sizes(t) is None or t.dtype is None for t in given):
            return None
        made = list[np.ndarray]()
        # Two lengths, to see what depends on the length; another size, to see what depends on that.
        for length, other in ((2 * reach + 9, 2), (3 * reach + 20, 2), (2 * reach + 9, 3)):
            symbols = self.sizes.at(length, given, other)
            try:
                shapes = [shape_at(t, symbols) for t in given]
                run = session(given, nodes, tensor, self._imports)
            except NotRunnableError as reason:
                log.debug("%s is not read: %s", tensor.name, reason)
                return None
            if any(math.prod(shape) > LARGEST for shape in shapes) or length**2 > LARGEST:
                return None
            tokens = shape_at(tensor, symbols)[axis]
            fed = {t.name: np.zeros(s, t.dtype) for t, s in zip(given, shapes, strict=True)}
            try:
                made += run.run(None, fed)
            except Exception as error:
                log.debug("%s at %d tokens: %s", tensor.name, length, error)
                return None
            if made[-1].shape[axis] != tokens:
                return None  # a table that ends
        short, long, varied = made
        if not np.array_equal(varied[tuple(map(slice, short.shape))], short):
            return None  # it depends on another size, such as how many rows a state has
        return _counted(tensor, axis, short, long, reach + 2)


def _counted(
    tensor: gs.Variable, axis: int, short: np.ndarray, long: np.ndarray, most: int
) -> Counted | None:
    """Return a value that is the same for a longer sequence, and a line after some positions."""
    first, whole = (np.moveaxis(x, axis, 0) for x in (short, long))
    if not np.array_equal(whole[: len(first)], first):
        return None  # it depends on the length
    numbers = whole.astype(np.float64)
    steps = np.diff(numbers, axis=0)
    # A line has equal differences: behind the last one that differs only two numbers are needed.
    same = (steps == steps[-1]).reshape(len(steps), -1).all(1)
    bent = np.flatnonzero(~same)
    count = int(bent[-1]) + 2 if bent.size else 1
    flat = whole.dtype.kind == "b" and bool(steps[-1].any())
    if count > most or flat:
        return None
    table, slope = (np.moveaxis(x, 0, axis) for x in (whole[:count], steps[-1:]))
    for place, size in enumerate(stated_sizes(tensor) or ()):
        if place != axis and size.known is None:
            # The same for each sequence of a batch: one is kept, and repeated where it is read.
            one = table.take([0], place)
            same = np.array_equal(np.broadcast_to(one, table.shape), table)
            if not same or not _repeats(tensor, place - table.ndim):
                return None
            table, slope = one, slope.take([0], place)
    return Counted(tensor, axis, table, slope)


def _repeats(tensor: gs.Tensor, place: int) -> bool:
    """Return whether all that reads a value would repeat it along a dim, counted from the last."""
    size = (stated_sizes(tensor) or [])[place]
    return all(
        node.op in ELEMENTWISE
        and any(
            t is not tensor and len(sizes) >= -place and sizes[place] == size
            for t in node.inputs
            if (sizes := stated_sizes(t)) is not None
        )
        for node in tensor.outputs
    )
