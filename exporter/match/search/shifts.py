"""Values that are earlier tokens of another value, whichever operators move them.

    y = c ... c ++ x ++ c ... c          cut to its first T + n tokens, n fixed
    y = s_1 .. s_k ++ x ++ c ... c       rows of a given value s in front

A delay by k has k rows in front and T in all. Padding and slicing, gathering by positions, rolling
under a mask, writing into zeros, products with a shifted diagonal: all of these put entries
elsewhere and compute nothing. They are therefore read by running them on random numbers, at lengths
below and beyond every constant that occurs in them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime

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

GIVEN = "given"
"""The filling where rows before the first token are the last rows of another value."""


@dataclass(frozen=True)
class Moved:
    """A value that has the tokens of another one, later.

    Attributes:
        source: the other one.
        result: the value.
        axis: of the tokens, in both.
        front: rows before the first token; 0 for what undoes a move.
        behind: rows behind the last one; below 0, the number of last tokens that are left out.
        fill: the number in rows in front, ``FIRST`` or ``GIVEN``.
        end: the number in rows behind.
        start: the value whose last rows are in front, where they are given.
    """

    source: gs.Tensor
    result: gs.Variable
    axis: int
    front: int
    behind: int
    fill: float | str
    end: float
    start: gs.Tensor | None = None

    def applied(self, x: np.ndarray, start: np.ndarray | None) -> np.ndarray:
        """Return the result without rows behind and without leaving any out.

        Args:
            x: the source.
            start: the value whose last rows are in front, where they are given.
        """
        given = None if start is None else np.moveaxis(start, self.axis, 0)
        change = _Change(self.front, 0, self.fill, 0.0)
        return np.moveaxis(change(np.moveaxis(x, self.axis, 0), given), 0, self.axis)

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
    """Reads values of a graph as moved tokens of others.

    Args:
        graph: its nodes are in order.
        sizes: which symbol is the number of tokens.
        of_no_token: whether a value follows from what is the same for all tokens.
    """

    def __init__(
        self, graph: gs.Graph, sizes: TokenSizes, of_no_token: Callable[[gs.Tensor], bool]
    ) -> None:
        self.sizes, self.positions = sizes, of_positions(graph)
        self._of_no_token = of_no_token
        self._imports = imports_of(graph)
        self._place = {id(node): i for i, node in enumerate(graph.nodes)}

    def read(self, result: gs.Variable) -> Moved | None:
        """Return what a value is made of, where it has earlier tokens of another one."""
        if result.name in self.positions:
            return None
        for source in self._sources(result):
            region = self._region(result, source)
            if region is None or not any(self._works_along(node) for node in region.nodes):
                continue
            found = self._run(source, result, region)
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

    def _region(self, result: gs.Tensor, source: gs.Tensor) -> _Region | None:
        """Return the nodes that make a value of another one, of positions and of given rows.

        None where others do.
        """
        found, starts = list[gs.Node](), dict[str, gs.Tensor]()
        pending, seen = [result], {source.name}
        while pending:
            tensor = pending.pop()
            node = next(iter(tensor.inputs), None)
            if tensor.name in seen or isinstance(tensor, gs.Constant) or tensor.is_empty():
                continue
            seen.add(tensor.name)
            fixed = tensor.name in self.positions
            if not fixed and self.sizes.lacks(tensor) and self._of_no_token(tensor):
                starts[tensor.name] = tensor
                continue
            if node is None or (not fixed and node.op not in MOVING):
                return None
            if any(node is n for n in found):
                continue
            found.append(node)
            if node.op not in SIZES_ONLY:
                pending += node.inputs
            if len(found) > 2 * MOST_NODES or len(starts) > 1:
                return None
        nodes = sorted(found, key=lambda n: self._place[id(n)])
        return _Region(nodes, next(iter(starts.values()), None))

    def _works_along(self, node: gs.Node) -> bool:
        """Return whether a node may move entries along the tokens."""
        if node.op not in ALONG or not self._data(node):
            return False
        if node.op != "Concat":
            return True
        sizes = stated_sizes(node.outputs[0])
        return sizes is None or self.sizes.symbol in symbols_in(sizes[node.attrs["axis"]])

    def _run(self, source: gs.Tensor, result: gs.Variable, region: _Region) -> Moved | None:
        """Return how the tokens are moved, where that is the same at all lengths."""
        axis, (nodes, start) = self.sizes.axis(source), region
        assert axis is not None
        reach = reach_of(nodes)
        given: list[gs.Tensor] = [*inputs_of(nodes)]
        if source not in given:
            given.append(source)
        if reach is None or any(stated_sizes(t) is None or t.dtype is None for t in given):
            return None
        try:
            run = session(given, nodes, result, self._imports)
        except NotRunnableError as reason:
            log.debug("%s is not read: %s", result.name, reason)
            return None
        probe = _Probe(run, given, self.sizes, source, start, result, axis)
        found = set[_Change]()
        for length, long in (
            (reach + 3, True),
            (2 * reach + 8, True),
            (reach // 3, False),
            (1, False),
        ):
            rows = probe.at(length)
            if rows is None or (long and rows.after is None):
                return None
            if rows.after is None:
                continue  # fewer tokens than the model takes
            own = _change(rows.before, rows.after, rows.start) if long else None
            if own is not None:
                found.add(own)
            # Another change at another length is one that depends on the length.
            if len(found) != 1 or (long and own is None):
                return None
            (change,) = found
            # The example may be shorter than the padding in front: a length at which the model does
            # not run does not speak against the shift.
            expected = change(rows.before, rows.start)
            if len(rows.after) == len(expected) and not np.array_equal(rows.after, expected):
                return None
        return Moved(source, result, axis, *change, start if change.fill == GIVEN else None)


class _Rows(NamedTuple):
    """Rows of a source, those that are made of them, and those of a start.

    ``after`` is None where nodes do not run at that length.
    """

    before: np.ndarray
    after: np.ndarray | None
    start: np.ndarray | None


@dataclass(frozen=True)
class _Probe:
    """Nodes that are run on random numbers, at lengths of a sequence.

    Attributes:
        session: of the nodes.
        given: what they read.
        sizes: which symbol is the number of tokens.
        source, start, result: the values whose rows are compared; a start may be missing.
        axis: of their tokens.
        random: numbers, other ones at each length.
    """

    session: onnxruntime.InferenceSession
    given: list[gs.Tensor]
    sizes: TokenSizes
    source: gs.Tensor
    start: gs.Tensor | None
    result: gs.Tensor
    axis: int
    random: np.random.Generator = field(default_factory=partial(np.random.default_rng, 0))

    def at(self, length: int) -> _Rows | None:
        """Return the rows at a length; None where they cannot be compared."""
        try:
            shapes = [shape_at(t, self.sizes.at(length, self.given)) for t in self.given]
        except NotRunnableError:
            return None
        if any(math.prod(shape) > LARGEST for shape in shapes):
            return None
        pairs = zip(self.given, shapes, strict=True)
        fed = {t.name: numbers(self.random, shape, t.dtype) for t, shape in pairs}
        x = fed[self.source.name]
        rows = None if self.start is None else fed[self.start.name]
        if rows is not None and rows.ndim != x.ndim:
            return None
        try:
            (made,) = self.session.run(None, fed)
        except Exception as error:
            log.debug("%s at %d tokens: %s", self.result.name, length, error)
            return _Rows(self._rows(x), None, None)
        if made.ndim != x.ndim or made.dtype != x.dtype:
            return None
        return _Rows(self._rows(x), self._rows(made), None if rows is None else self._rows(rows))

    def _rows(self, value: np.ndarray) -> np.ndarray:
        return np.moveaxis(value, self.axis, 0)


class _Region(NamedTuple):
    """Nodes that make a value, in graph order, and the value whose rows they put in front."""

    nodes: list[gs.Node]
    start: gs.Tensor | None


class _Change(NamedTuple):
    """Rows in front, rows behind, and what both are filled with."""

    front: int
    behind: int
    fill: float | str
    end: float

    def __call__(self, x: np.ndarray, start: np.ndarray | None) -> np.ndarray:
        """Return what it makes of rows, with those of a start in front where they are given."""
        if self.fill == GIVEN:
            assert start is not None
            before = start[len(start) - self.front :]
        elif self.fill == FIRST:
            before = np.repeat(x[:1], self.front, axis=0)
        else:
            before = np.full((self.front, *x.shape[1:]), self.fill, x.dtype)
        after = np.full((max(self.behind, 0), *x.shape[1:]), self.end, x.dtype)
        return np.concatenate([before, x, after])[: max(len(x) + self.front + self.behind, 0)]


def _change(x: np.ndarray, y: np.ndarray, start: np.ndarray | None) -> _Change | None:
    """Return what made y of the rows x, and of those of a start, where it is such a change."""
    if not x.size or x.shape[1:] != y.shape[1:]:
        return None
    same = (y == x[:1]).reshape(len(y), -1).all(1)
    # The filling may equal the first row, too: the last such row is tried first.
    for front in np.flatnonzero(same)[::-1]:
        kept = y[front : front + len(x)]
        fill, end = _filling(y[:front], x, start), _filling(y[front + len(x) :], x, None)
        if np.array_equal(kept, x[: len(kept)]) and fill is not None and isinstance(end, float):
            return _Change(int(front), int(len(y) - front - len(x)), fill, end)
    return None


def _filling(rows: np.ndarray, x: np.ndarray, start: np.ndarray | None) -> float | str | None:
    """Return the number in rows, or that they repeat the first token or are those of a start."""
    if not rows.size:
        return 0.0
    if (rows == rows.ravel()[0]).all():
        return float(rows.ravel()[0])
    if start is not None and np.array_equal(rows, start[max(len(start) - len(rows), 0) :]):
        return GIVEN
    return FIRST if np.array_equal(rows, np.broadcast_to(x[:1], rows.shape)) else None
