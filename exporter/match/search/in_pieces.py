"""Nodes that see rows in front of the tokens, proven to give in pieces what they give in one.

    f(0 .. 0 ++ x)[a : b]      =      f(rows before a ++ x[a : b])

for a convolution, a pooling, an unfolding, slices of a padded value, and any nodes between that act
on each token alone. Whether they do is found by running both sides, at two lengths, in pieces
shorter and longer than the rows.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind
from linexport.graph.operators import SIZES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, session
from linexport.match.emit.candidate import inputs_of
from linexport.match.forms.token_sizes import (
    LARGEST,
    TokenSizes,
    imports_of,
    numbers,
    of_positions,
    shape_at,
)
from linexport.match.search.shifts import Moved

log = logging.getLogger(__name__)

ROUNDING = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Differences of equal values, of the largest one: half precisions carry 11 and 8 bits."""

MOST_NODES = 200
"""Nodes that one window may pass through."""


class NoWindowError(Exception):
    """Nodes do not look back by rows in front of the tokens alone; the text says why."""


@dataclass(frozen=True)
class Window:
    """Nodes between values with rows in front of their tokens and values with one row a token.

    Attributes:
        given: the former.
        nodes: in graph order, with those that compute positions for them.
        ends: the latter.
        lasts: values without tokens, which are those behind the last token.
    """

    given: tuple[Moved, ...]
    nodes: tuple[gs.Node, ...]
    ends: tuple[gs.Tensor, ...]
    lasts: tuple[gs.Tensor, ...]


class WindowReader:
    """Finds and proves windows in a graph.

    Args:
        graph: its nodes are in order.
        sizes: which symbol is the number of tokens.
        longer: values with rows in front of their tokens, by name.
    """

    def __init__(self, graph: gs.Graph, sizes: TokenSizes, longer: Mapping[str, Moved]) -> None:
        self.graph, self.sizes, self.longer = graph, sizes, longer
        self._positions, self._imports = of_positions(graph), imports_of(graph)
        self._place = {id(node): i for i, node in enumerate(graph.nodes)}
        self._outputs = {t.name for t in graph.outputs}

    def read(self, first: Moved) -> Window:
        """Return what sees the rows in front of a value, with all other such values it sees.

        Raises:
            NoWindowError: it gives no value with one row a token, or is not the same in pieces.
        """
        given = {first.result.name: first}
        while True:
            nodes, ends, lasts = self._forward(given)
            joined = self._joined(nodes, given)
            if not joined:
                break
            given |= joined
        window = Window(
            tuple(given.values()), self._with_positions(nodes), *map(tuple, (ends, lasts))
        )
        for length in (1, 3):
            self._prove(window, length)
        return window

    def _forward(
        self, given: Mapping[str, Moved]
    ) -> tuple[list[gs.Node], list[gs.Tensor], list[gs.Tensor]]:
        """Return the nodes behind values up to those of one row a token or of none, and these."""
        pending = [moved.result for moved in given.values()]
        nodes = dict[int, gs.Node]()
        ends, lasts = dict[str, gs.Tensor](), dict[str, gs.Tensor]()
        while pending:
            tensor = pending.pop()
            if tensor.name in self._outputs:
                raise NoWindowError(f"{tensor.name} is an output")
            for node in tensor.outputs:
                if node.op in SIZES_ONLY or id(node) in nodes:
                    continue
                nodes[id(node)] = node
                for made in node.outputs:
                    if self.sizes.axis(made) is not None:
                        ends[made.name] = made
                    elif self.sizes.lacks(made):
                        lasts[made.name] = made
                    else:
                        pending.append(made)
            if len(nodes) > MOST_NODES:
                raise NoWindowError(f"more than {MOST_NODES} nodes see them")
        return list(nodes.values()), list(ends.values()), list(lasts.values())

    def _joined(self, nodes: Sequence[gs.Node], given: Mapping[str, Moved]) -> dict[str, Moved]:
        """Return more values with rows in front that nodes read."""
        found = {}
        for tensor in inputs_of(nodes):
            if tensor.name in given or tensor.name in self._positions:
                continue
            if tensor.name in self.longer:
                found[tensor.name] = self.longer[tensor.name]
            elif self.sizes.is_longer(tensor) and self.sizes.axis(tensor) is None:
                raise NoWindowError(f"{tensor.name} has another number of tokens")
        return found

    def _with_positions(self, nodes: Sequence[gs.Node]) -> tuple[gs.Node, ...]:
        """Return nodes with those that compute places of tokens for them, in graph order."""
        places = [t for t in inputs_of(nodes) if self._is_computed(t)]
        found = nodes_behind(places, SIZES_ONLY, nodes)
        return tuple(sorted(found, key=lambda n: self._place[id(n)]))

    def _is_computed(self, tensor: gs.Tensor) -> bool:
        """Return whether a value is of places in a piece: others are of positions in the whole."""
        whole = np.dtype(tensor.dtype).kind in "bf" if tensor.dtype is not None else False
        return tensor.name in self._positions and not (
            whole and self.sizes.axis(tensor) is not None
        )

    def _prove(self, window: Window, times: int) -> None:
        """Run nodes on a sequence and on pieces of it.

        Raises:
            NoWindowError: the results differ, or the nodes do not run on their own.
        """
        rows = max(moved.front for moved in window.given)
        # Pieces shorter and longer than the rows in front, so that rows come from one and from
        # several.
        lengths = [self.sizes.whole(n) for n in (1, rows + 2, 1, rows // 2 + 1, times * rows + 3)]
        made = {m.result.name: m for m in window.given}
        others = [t for t in inputs_of(window.nodes) if t.name not in made]
        sources = [t for m in window.given for t in (m.source, m.start) if t is not None]
        tensors = [*sources, *(t for t in others if t.name not in {s.name for s in sources})]
        values = self._values(tensors, sum(lengths), times)
        inputs = [*(m.result for m in window.given), *others]
        for end in (*window.ends, *window.lasts):
            try:
                run = session(inputs, window.nodes, end, self._imports)
                (whole,) = run.run(None, self._fed(window, others, values, 0, sum(lengths)))
                parts = [
                    run.run(None, self._fed(window, others, values, a, b))[0]
                    for a, b in _spans(lengths)
                ]
            except NotRunnableError as reason:
                raise NoWindowError(str(reason)) from None
            except Exception as error:
                log.info("%s does not run in pieces: %s", end.name, error)
                raise NoWindowError(f"{end.name} is not computed of pieces of a sequence") from None
            axis = self.sizes.axis(end)
            joined = parts[-1] if axis is None else np.concatenate(parts, axis)
            if not nearly_equal(joined, whole):
                raise NoWindowError(f"{end.name} differs in pieces of {lengths} tokens")

    def _values(
        self, tensors: Sequence[gs.Tensor], length: int, seed: int
    ) -> dict[str, np.ndarray]:
        """Return numbers for a sequence of some length.

        Raises:
            NoWindowError: a size is not known, or too large.
        """
        if any(stated_sizes(t) is None or t.dtype is None for t in tensors):
            raise NoWindowError("the sizes of what they read are not known")
        symbols = self.sizes.at(length, tensors)
        shapes = [shape_at(t, symbols) for t in tensors]
        if any(math.prod(shape) > LARGEST for shape in shapes):
            raise NoWindowError("what they read is too large to be compared")
        random = np.random.default_rng(seed)
        pairs = zip(tensors, shapes, strict=True)
        return {t.name: numbers(random, shape, t.dtype) for t, shape in pairs}

    def _fed(
        self,
        window: Window,
        others: Sequence[gs.Tensor],
        values: Mapping[str, np.ndarray],
        start: int,
        end: int,
    ) -> dict[str, np.ndarray]:
        """Return the inputs for the tokens from one place to another."""
        fed = {}
        for moved in window.given:
            rows = None if moved.start is None else values[moved.start.name]
            long = moved.applied(values[moved.source.name], rows)
            last = end + moved.front + min(moved.behind, 0)
            part = np.take(long, range(start, last), moved.axis)
            fed[moved.result.name] = moved.ended(part)
        for tensor in others:
            axis, x = self.sizes.axis(tensor), values[tensor.name]
            fed[tensor.name] = x if axis is None else np.take(x, range(start, end), axis)
        return fed


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise([0, *itertools.accumulate(lengths)])


def nearly_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays are the same, but for rounding of sums in another order."""
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "biu":
        return np.array_equal(a, b)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    # Sums of a piece may be taken in another order, with the rounding of the dtype.
    share = ROUNDING.get(b.dtype.name, ROUNDING["float32"])
    return not x.size or float(np.abs(x - y).max()) <= share * float(np.abs(y).max())
