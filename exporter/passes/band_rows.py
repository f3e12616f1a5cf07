"""Sums over the last w tokens with weights of pairs -> the same with rows of the past as states.

    sum_s a_ts v_s, 0 <= t - s < w     becomes     the same over s in [past, x], w - 1 rows of past

All that is read of each key, such as keys and values, is its last rows and those at hand. Masks are
written anew for as many columns; rows of no token, which are zero, are masked as what is too far
away. Softmax attention alone keeps its rows as keys and values, see ``expose_key_values``.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import NoMatchError, Pass, PassResult
from linexport.graph.edit import detach, nodes_behind
from linexport.graph.operators import SIZES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, session
from linexport.graph.shapes import completed_shapes
from linexport.graph.tensors import known_shape
from linexport.match.emit.candidate import inputs_of
from linexport.match.errors import NotAttentionError
from linexport.match.forms.token_sizes import LARGEST, TokenSizes, imports_of, numbers, shape_at
from linexport.match.search.band_nodes import BandWriter
from linexport.match.search.bands import Band, BandReader
from linexport.match.search.in_pieces import nearly_equal
from linexport.match.search.masked_softmax import SoftmaxReader
from linexport.passes.past_rows import PastRows, RowsLayout

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Give every such sum its rows, where other nodes tell the token axis."""
    length = sequence_axis.symbol(graph)
    if length is None:
        log.debug("no band gets a state: no causal node tells the axis of the tokens")
        return PassResult(False)
    with completed_shapes(graph):
        return PassResult(_Bands(graph, length).write())


class _Bands:
    """Bands of a graph, and their replacement."""

    def __init__(self, graph: gs.Graph, length: str) -> None:
        self.graph, self.sizes = graph, TokenSizes(length)
        self.reader = BandReader(graph, self.sizes)
        self.softmax = SoftmaxReader(graph, length)
        self.rows = PastRows(graph, length, "band_rows")
        self.proof = _Proof(graph, self.sizes)

    def write(self) -> bool:
        """Change the graph; returns whether there was anything to change."""
        done, found = set[int](), list[BandWriter]()
        for node in list(self.reader.sums()):
            if id(node) in done:
                continue
            try:
                band = self.reader.read(node)
                done |= {id(n) for n in band.nodes}
                found.append(self._written(band))
            except (NotAttentionError, NoMatchError) as reason:
                log.debug("%s %r is left as it is: %s", node.op, node.name, reason)
                continue
            log.info("%s sums over the last %d tokens", node.name, band.rows + 1)
        self._place(found)
        return bool(found)

    def _written(self, band: Band) -> BandWriter:
        """Return a band as nodes, proven to give the same.

        Raises:
            NotAttentionError, NoMatchError: it is not the same, or has no state.
        """
        self._check(band)
        writer = BandWriter(band, self.sizes, self.rows.batch)
        try:
            writer.write()
            self.proof.check(writer)
        except NotAttentionError:
            detach(writer.nodes)
            raise
        return writer

    def _check(self, band: Band) -> None:
        """Refuse a band without a state, and softmax attention, whose rows are keys and values."""
        for column in band.columns.values():
            RowsLayout.of(column.tensor, column.axis, self.rows.batch)
        for node in band.nodes:
            if node.op == "Softmax" and self._is_read(node):
                raise NotAttentionError("it is softmax attention")

    def _is_read(self, softmax: gs.Node) -> bool:
        try:
            self.softmax.read(softmax)
        except NotAttentionError:
            return False
        return True

    def _place(self, found: Sequence[BandWriter]) -> None:
        """Put bands in the place of what they are of; columns that they share have one state."""
        columns = {(n, c.axis): c for writer in found for n, c in writer.band.columns.items()}
        for (name, axis), column in columns.items():
            users = [w for w in found if name in w.seen and w.band.columns[name].axis == axis]
            longest = max(writer.band.rows for writer in users)
            line = self.rows.line(column.tensor, axis, longest, 0)
            for writer in users:
                self.rows.fill(writer.seen[name], line, axis, writer.band.rows)
        counting = [writer for writer in found if writer.real is not None]
        if counting:
            line = self.rows.real(max(writer.band.rows for writer in counting))
            for writer in counting:
                assert writer.real is not None
                self.rows.fill(writer.real, line, 1, writer.band.rows)
        for writer in found:
            for node in writer.band.nodes:
                node.outputs = []
            self.graph.nodes += writer.nodes


@dataclass(frozen=True)
class _Sides:
    """A band as it is, and with rows of the past, with what both are run on.

    Attributes:
        writer: has written the second.
        before: nodes of the first, and of its masks.
        columns: what it reads of each key.
        others: what else both read.
        values: numbers for these.
        lengths: of pieces of the sequence.
    """

    writer: BandWriter
    before: Sequence[gs.Node]
    columns: Sequence[gs.Tensor]
    others: Sequence[gs.Tensor]
    values: Mapping[str, np.ndarray]
    lengths: Sequence[int]


class _Proof:
    """Bands run as they are, on a whole sequence, and with rows of the past, on pieces of it."""

    def __init__(self, graph: gs.Graph, sizes: TokenSizes) -> None:
        self.sizes, self._imports = sizes, imports_of(graph)
        self._place = {id(node): i for i, node in enumerate(graph.nodes)}

    def check(self, writer: BandWriter) -> None:
        """Compare both sides.

        Raises:
            NotAttentionError: they differ, or do not run on their own.
        """
        band, rows = writer.band, writer.band.rows
        before = self._with_masks(band)
        columns = [c.tensor for c in band.columns.values()]
        real = [] if writer.real is None else [writer.real]
        made = {t.name for t in [*columns, *writer.seen.values()]}
        given = inputs_of(before, writer.nodes)
        others = [t for t in given if t.name not in made and not any(t is r for r in real)]
        # Pieces shorter and longer than the rows of the past.
        lengths = [self.sizes.whole(n) for n in (1, rows // 2 + 1, 1, 7, rows + 2)]
        values = self._values(band, [*columns, *others], sum(lengths))
        if values is None:
            log.info("%s is not run: its values of pairs are too large", band.nodes[-1].name)
            return
        sides = _Sides(writer, before, columns, others, values, lengths)
        for end in (o for n in band.nodes for o in n.outputs if not self.sizes.is_pair(o)):
            whole, parts = self._run(sides, end)
            axis = self.sizes.axis(end)
            if axis is None or not nearly_equal(np.concatenate(parts, axis), whole):
                raise NotAttentionError(f"{end.name} differs in pieces of {lengths} tokens")

    def _values(
        self, band: Band, tensors: Sequence[gs.Tensor], length: int
    ) -> dict[str, np.ndarray] | None:
        """Return numbers for a sequence of some length; None where arrays would be too large.

        Raises:
            NotAttentionError: a size is not known.
        """
        if any(stated_sizes(t) is None or t.dtype is None for t in tensors):
            raise NotAttentionError("the sizes of what it reads are not known")
        symbols = self.sizes.at(length, tensors)
        pairs = [o for n in band.nodes for o in n.outputs if self.sizes.is_pair(o)]
        try:
            shapes = {t.name: shape_at(t, symbols) for t in tensors}
            sizes = [shape_at(t, symbols) for t in pairs]
        except NotRunnableError as error:
            raise NotAttentionError(str(error)) from None
        if any(math.prod(shape) > LARGEST for shape in [*shapes.values(), *sizes]):
            return None
        random = np.random.default_rng(band.rows)
        return {t.name: numbers(random, shapes[t.name], t.dtype) for t in tensors}

    def _run(self, sides: _Sides, end: gs.Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return a value of a whole sequence, and of each of its pieces with rows of the past.

        Raises:
            NotAttentionError: a side does not run on its own.
        """
        writer, others = sides.writer, sides.others
        real = [] if writer.real is None else [writer.real]
        seen = [*writer.seen.values(), *real, *others]
        try:
            one = session([*sides.columns, *others], sides.before, end, self._imports)
            many = session(seen, writer.nodes, end, self._imports)
            (whole,) = one.run(None, sides.values)
            parts = [
                many.run(None, self._fed(writer, others, sides.values, a, b))[0]
                for a, b in itertools.pairwise([0, *itertools.accumulate(sides.lengths)])
            ]
        except NotRunnableError as error:
            raise NotAttentionError(str(error)) from None
        except Exception as error:
            raise NotAttentionError(str(error).strip().splitlines()[0]) from None
        return whole, parts

    def _with_masks(self, band: Band) -> list[gs.Node]:
        """Return the nodes of a band, with those that compute its masks."""
        masks = [tensor for tensor, _ in band.masks.values()]
        found = nodes_behind(masks, SIZES_ONLY, band.nodes)
        return sorted(found, key=lambda n: self._place[id(n)])

    def _fed(
        self,
        writer: BandWriter,
        others: Sequence[gs.Tensor],
        values: Mapping[str, np.ndarray],
        start: int,
        end: int,
    ) -> dict[str, np.ndarray]:
        """Return the inputs for the tokens from one place to another."""
        rows, fed = writer.band.rows, {}
        for name, column in writer.band.columns.items():
            x = values[name]
            widths = [(rows, 0) if i == column.axis else (0, 0) for i in range(x.ndim)]
            places = range(start, end + rows)
            fed[writer.seen[name].name] = np.take(np.pad(x, widths), places, column.axis)
        if writer.real is not None:
            batch = 1 if isinstance(known_shape(writer.real)[0], int) else 2
            known = np.arange(start - rows, end) >= 0
            fed[writer.real.name] = np.tile(known.astype(np.float32), (batch, 1))
        for tensor in others:
            axis, x = self.sizes.axis(tensor), values[tensor.name]
            fed[tensor.name] = x if axis is None else np.take(x, range(start, end), axis)
        return fed


PASS = Pass(
    name="band_rows",
    stage="stream",
    requires="linear attention is fused: its nodes tell which axis holds the tokens",
    ensures="sums over the last tokens with weights of pairs read rows of the past, states",
    run=run,
)
