"""Values that are earlier tokens of another value, whichever operators move them.

    y = c ... c ++ x ++ c ... c          cut to its first T + n tokens, n fixed

A delay by k has k rows in front and T in all. Padding and slicing, gathering by positions, rolling
under a mask, writing into zeros, products with a shifted diagonal: all of these put entries
elsewhere and compute nothing. They are therefore read by running them on random numbers, at lengths
below and beyond every constant that occurs in them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.graph.operators import CONTRACTIONS, INDEXING, LAYOUT, SIZES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, session, symbols_in
from linexport.match.emit.candidate import inputs_of
from linexport.match.emit.layout import written_size
from linexport.match.forms.token_sizes import (
    LARGEST,
    TokenSizes,
    imports_of,
    numbers,
    of_positions,
    reach_of,
    shape_at,
)

log = logging.getLogger(__name__)

ALONG = INDEXING | CONTRACTIONS | {"Pad", "Slice", "Concat"}
"""Operators that may give a token the entries of another one."""

SELECTING = ("Where", "Mul")
"""Operators that may take entries away."""

MOVING = {*ALONG, *LAYOUT, *SELECTING, "Split"}

MOST_NODES = 40
"""Nodes behind a value that are looked through."""

FIRST = "first"
"""The filling where rows before the first token repeat it."""


@dataclass(frozen=True)
class Moved:
    """A value that has the tokens of another one, later.

    Attributes:
        source: the other one.
        result: the value.
        axis: of the tokens, in both.
        front: rows before the first token; 0 for what undoes a move.
        behind: rows behind the last one; below 0, the number of last tokens that are left out.
        fill: the number in rows in front, or ``FIRST``.
        end: the number in rows behind.
    """

    source: gs.Tensor
    result: gs.Variable
    axis: int
    front: int
    behind: int
    fill: float | str
    end: float

    def applied(self, x: np.ndarray) -> np.ndarray:
        """Return the result without rows behind and without leaving any out."""
        rows = _Change(self.front, 0, self.fill, 0.0)(np.moveaxis(x, self.axis, 0))
        return np.moveaxis(rows, 0, self.axis)

    def ended(self, x: np.ndarray) -> np.ndarray:
        """Return a part of it with the rows behind."""
        widths = [(0, max(self.behind, 0) if p == self.axis else 0) for p in range(x.ndim)]
        return np.pad(x, widths, constant_values=np.asarray(self.end, x.dtype))

    def sizes(self) -> list[int | str]:
        """Return the sizes of the result."""
        found = stated_sizes(self.source) or []
        found[self.axis] += Size(self.front + self.behind)
        return [written_size(size) for size in found]

    @property
    def is_delay(self) -> bool:
        """True where it has as many tokens as its source."""
        return self.front + self.behind == 0


class MoveReader:
    """Reads values of a graph as moved tokens of others."""

    def __init__(self, graph: gs.Graph, sizes: TokenSizes) -> None:
        self.sizes, self.positions = sizes, of_positions(graph)
        self._imports = imports_of(graph)
        self._place = {id(node): i for i, node in enumerate(graph.nodes)}

    def read(self, result: gs.Variable) -> Moved | None:
        """Return what a value is made of, where it has earlier tokens of another one."""
        if result.name in self.positions:
            return None
        for source in self._sources(result):
            region = self._region(result, source)
            if region is None or not any(self._works_along(node) for node in region):
                continue
            axis = self.sizes.axis(source)
            assert axis is not None
            found = self._run(source, result, axis, region)
            if found is not None and (found.front > 0 or found.is_delay):
                return found
        return None

    def _sources(self, result: gs.Tensor) -> Iterator[gs.Tensor]:
        """Yield values with a token axis behind a value, the nearest first."""
        pending, seen = [result], {result.name}
        while pending and len(seen) < MOST_NODES:
            node = next(iter(pending.pop(0).inputs), None)
            if node is None or node.op not in MOVING:
                continue
            for tensor in self._data(node):
                if tensor.name not in seen:
                    seen.add(tensor.name)
                    pending.append(tensor)
                    if self.sizes.axis(tensor) is not None:
                        yield tensor

    def _data(self, node: gs.Node) -> list[gs.Variable]:
        """Return the inputs of a node that depend on more than positions."""
        return [
            t
            for t in node.inputs
            if isinstance(t, gs.Variable) and not t.is_empty() and t.name not in self.positions
        ]

    def _region(self, result: gs.Tensor, source: gs.Tensor) -> list[gs.Node] | None:
        """Return the nodes that make a value of another one and of positions; None if others do."""
        found: list[gs.Node] = []
        pending, seen = [result], {source.name}
        while pending:
            tensor = pending.pop()
            node = next(iter(tensor.inputs), None)
            if tensor.name in seen or isinstance(tensor, gs.Constant) or tensor.is_empty():
                continue
            seen.add(tensor.name)
            fixed = tensor.name in self.positions
            if node is None or (not fixed and node.op not in MOVING):
                return None
            if any(node is n for n in found):
                continue
            found.append(node)
            if node.op not in SIZES_ONLY:
                pending += node.inputs
            if len(found) > 2 * MOST_NODES:
                return None
        return sorted(found, key=lambda n: self._place[id(n)])

    def _works_along(self, node: gs.Node) -> bool:
        """Return whether a node may move entries along the tokens."""
        if node.op not in ALONG or not self._data(node):
            return False
        if node.op != "Concat":
            return True
        sizes = stated_sizes(node.outputs[0])
        return sizes is None or self.sizes.symbol in symbols_in(sizes[node.attrs["axis"]])

    def _run(
        self, source: gs.Tensor, result: gs.Variable, axis: int, region: Sequence[gs.Node]
    ) -> Moved | None:
        """Return how the tokens are moved, where that is the same at all lengths."""
        reach = reach_of(region)
        given: list[gs.Tensor] = [*inputs_of(region)]
        if source not in given:
            given.append(source)
        if reach is None or any(stated_sizes(t) is None or t.dtype is None for t in given):
            return None
        try:
            run = session(given, region, result, self._imports)
        except NotRunnableError as reason:
            log.debug("%s is not read: %s", result.name, reason)
            return None
        random, found = np.random.default_rng(0), set[_Change]()
        for length, long in (
            (reach + 3, True),
            (2 * reach + 8, True),
            (reach // 3, False),
            (1, False),
        ):
            try:
                shapes = [shape_at(t, self.sizes.at(length, given)) for t in given]
            except NotRunnableError:
                return None
            if any(math.prod(shape) > LARGEST for shape in shapes):
                return None
            pairs = zip(given, shapes, strict=True)
            fed = {t.name: numbers(random, shape, t.dtype) for t, shape in pairs}
            x = np.moveaxis(fed[source.name], axis, 0)
            try:
                (made,) = run.run(None, fed)
            except Exception as error:
                log.debug("%s at %d tokens: %s", result.name, length, error)
                if long:
                    return None
                continue  # fewer tokens than the model takes
            if made.ndim != x.ndim or made.dtype != x.dtype:
                return None
            y = np.moveaxis(made, axis, 0)
            own = _change(x, y) if long else None
            if own is not None:
                found.add(own)
            # Another change at another length is one that depends on the length.
            if len(found) != 1 or (long and own is None):
                return None
            (change,) = found
            # The example may be shorter than the padding in front: a length at which the model does
            # not run does not speak against the shift.
            if len(y) == len(change(x)) and not np.array_equal(y, change(x)):
                return None
        return Moved(source, result, axis, *change)


class _Change(NamedTuple):
    """Rows in front, rows behind, and what both are filled with."""

    front: int
    behind: int
    fill: float | str
    end: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return what it makes of rows."""
        before = np.full(
            (self.front, *x.shape[1:]), 0 if self.fill == FIRST else self.fill, x.dtype
        )
        if self.fill == FIRST:
            before = np.repeat(x[:1], self.front, axis=0)
        after = np.full((max(self.behind, 0), *x.shape[1:]), self.end, x.dtype)
        return np.concatenate([before, x, after])[: max(len(x) + self.front + self.behind, 0)]


def _change(x: np.ndarray, y: np.ndarray) -> _Change | None:
    """Return what made y of the rows x, where it is such a change."""
    if not x.size or x.shape[1:] != y.shape[1:]:
        return None
    same = (y == x[:1]).reshape(len(y), -1).all(1)
    # The filling may equal the first row, too: the last such row is tried first.
    for front in np.flatnonzero(same)[::-1]:
        kept = y[front : front + len(x)]
        fill, end = _filling(y[:front], x), _filling(y[front + len(x) :], x)
        if np.array_equal(kept, x[: len(kept)]) and fill is not None and isinstance(end, float):
            return _Change(int(front), int(len(y) - front - len(x)), fill, end)
    return None


def _filling(rows: np.ndarray, x: np.ndarray) -> float | str | None:
    """Return the number that rows are filled with, or that they repeat the first token."""
    if not rows.size:
        return 0.0
    if (rows == rows.ravel()[0]).all():
        return float(rows.ravel()[0])
    return FIRST if np.array_equal(rows, np.broadcast_to(x[:1], rows.shape)) else None
