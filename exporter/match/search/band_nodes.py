"""A band as nodes over columns that have rows of the past in front.

d = rows + t - s            the distance from a column s of rows + T to the row t of T
mask(d)                     as it was, and for columns of no token what it is far away
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.dims import Shape
from linexport.graph.edit import END
from linexport.graph.monomials import Size
from linexport.graph.operators import CONTRACTIONS
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import Nodes
from linexport.match.errors import NotAttentionError
from linexport.match.forms.distances import ByDistance
from linexport.match.forms.token_sizes import TokenSizes
from linexport.match.search.bands import Band

BOOL = np.dtype(bool)

MOST_RUNS = 6
"""Runs of equal mask values that are written as comparisons of distances; more become a table."""


class BandWriter(Nodes):
    """Writes a band.

    Args:
        band: as it is in a graph.
        sizes: which symbol is the number of tokens.
        batch: the size of the batch; None where there is none.

    Attributes:
        seen: columns with rows of the past, by the name of the column.
        real: which rows are of tokens, (B, rows + T) and above 0; None where it does not matter.
    """

    def __init__(self, band: Band, sizes: TokenSizes, batch: Size | None) -> None:
        super().__init__(f"{band.nodes[0].outputs[0].name}/band", [])
        self.band, self.sizes, self.batch = band, sizes, batch
        self.total = f"{band.rows}+{sizes.tokens}"
        self.seen: dict[str, gs.Variable] = {}
        self.real: gs.Variable | None = None
        self._distances: gs.Tensor | None = None
        self._is_real: gs.Tensor | None = None

    def write(self) -> None:
        """Write all nodes; what they compute of each token has the tensors that it had.

        Raises:
            NotAttentionError: the batch is not an axis of its values.
        """
        for name, column in self.band.columns.items():
            shape = list(known_shape(column.tensor))
            shape[column.axis] = self.total
            self.seen[name] = gs.Variable(self.name("seen"), column.tensor.dtype, shape)
        if self.band.counts:
            first = 1 if self.batch is None else str(self.batch)
            self.real = gs.Variable(self.name("real"), np.float32, [first, self.total])
            self._is_real = self._in_layout(self.real)
        made: dict[str, gs.Tensor] = dict(self.seen)
        for name, (tensor, mask) in self.band.masks.items():
            made[name] = self._mask(np.dtype(tensor.dtype), mask)
        for node in self.band.nodes:
            if node.outputs[0].name in self.band.selections:
                made[node.outputs[0].name] = self._selected(node.outputs[0], made)
                continue
            inputs = [made.get(t.name, t) for t in node.inputs]
            if node.op == "Trilu":  # column 0 is so many rows before the first token
                inputs[1:] = [self._integer(self.band.diagonals[node.name] + self.band.rows)]
            outputs: list[gs.Variable] = []
            for tensor in node.outputs:
                output = tensor
                if self.sizes.is_pair(tensor):
                    sizes = self._pairs(node, tensor, inputs)
                    output = gs.Variable(self.name("pairs"), tensor.dtype, sizes)
                    made[tensor.name] = output
                outputs.append(output)
            copy = gs.Node(node.op, f"{node.name}/band", node.attrs, inputs, domain=node.domain)
            copy.outputs = outputs
            self.nodes.append(copy)

    def _pairs(self, node: gs.Node | None, tensor: gs.Tensor, inputs: list[gs.Tensor]) -> Shape:
        """Return the sizes of a value of pairs; a mask of which rows are real adds the batch."""
        shapes: list[Shape] = [[*known_shape(tensor)[:-1], self.total]]
        if node is None or node.op not in CONTRACTIONS:
            shapes += [list(t.shape) for t in inputs if t.shape is not None]
        rank = max(map(len, shapes))
        full = [[*[1] * (rank - len(shape)), *shape] for shape in shapes]
        return [next((n for n in sizes if n != 1), 1) for sizes in zip(*full, strict=True)]

    def _selected(self, tensor: gs.Tensor, made: Mapping[str, gs.Tensor]) -> gs.Tensor:
        """Return another value of pairs where a sum is that value, and 0 where it is 0."""
        name, kept = self.band.selections[tensor.name]
        inputs = [self._mask(BOOL, kept), made[name]]
        shape = self._pairs(None, tensor, inputs)
        return self.op.Where(*inputs, np.zeros((), tensor.dtype), dtype=tensor.dtype, shape=shape)

    def _mask(self, dtype: np.dtype[np.generic], mask: ByDistance) -> gs.Tensor:
        """Return a mask of rows and columns, (T, rows + T) or with axes in front."""
        last = self.band.rows + 1
        values = np.asarray(mask.at(np.arange(-1, last + 1))).astype(dtype)
        far, runs = values[-1], list[tuple[int, int, np.generic]]()
        # Distances below 0 are a run of their own: those columns are tokens at hand.
        for (_, value), places in groupby(range(last + 1), key=lambda i: (i > 0, values[i])):
            own = [place - 1 for place in places]
            runs += [(own[0], own[-1], value)] if value != far else []
        if len(runs) > MOST_RUNS:
            return self._table(values, dtype)
        found: gs.Tensor = gs.Constant(self.name("far"), np.asarray(far, dtype))
        if dtype == BOOL and runs:
            return self._any(runs) if not far else self.op.Not(self._any(runs))
        for first, end, value in runs:
            within = self._within(first, end)
            shape = max(known_shape(within), known_shape(found), key=len)
            found = self.op.Where(within, np.asarray(value, dtype), found, shape=shape)
        return found

    def _any(self, runs: list[tuple[int, int, np.generic]]) -> gs.Tensor:
        """Return where distances are in one of several runs."""
        first, *rest = [self._within(a, b) for a, b, _ in runs]
        for other in rest:
            # Only what is read of earlier tokens asks which rows are real, by an axis of the batch.
            shape = max(known_shape(first), known_shape(other), key=len)
            first = self.op.Or(first, other, shape=shape)
        return first

    def _within(self, first: int, end: int) -> gs.Tensor:
        """Return where distances are from one number to another, and columns of tokens."""
        d = self._distance()
        found = self.op.LessOrEqual(d, end)
        if first < 0:
            return found
        found = self.op.And(self.op.GreaterOrEqual(d, first), found)
        if self._is_real is None:
            return found
        shape = [*known_shape(self._is_real)[:-2], *known_shape(d)]
        return self.op.And(found, self._is_real, shape=shape)

    def _table(self, values: np.ndarray, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """Return values that are looked up by distance."""
        d, far = self._distance(), self.band.rows + 1
        # Beyond these distances the mask is constant.
        place = self.op.Min(self.op.Max(d, -1), far)
        if self._is_real is not None:
            shape = [*known_shape(self._is_real)[:-2], *known_shape(d)]
            place = self.op.Where(self._is_real, place, np.asarray(far), shape=shape)
        place = self.op.Add(place, 1)
        found = self.op.Gather(values, place, axis=0)
        # The value far from the diagonal is a constant of its own, by which a band is matched.
        first = 0 if values[0] == values[-1] else -1
        within = self._within(first, far - 1)
        return self.op.Where(within, found, np.asarray(values[-1]), shape=found.shape)

    def _distance(self) -> gs.Tensor:
        """(T, rows + T)."""
        if self._distances is None:
            name, column = next(iter(self.band.columns.items()))
            count = self.op.Shape(self.seen[name], start=column.axis, end=column.axis + 1)
            columns = self.op.Range(0, self.op.Squeeze(count), 1, shape=[self.total])
            tokens = str(self.sizes.tokens)
            rows = self.op.Slice(columns, [self.band.rows], [END], [0], shape=[tokens])
            rows = self.op.Unsqueeze(rows, [1])
            self._distances = self.op.Sub(rows, columns, shape=[tokens, self.total])
        return self._distances

    def _in_layout(self, real: gs.Tensor) -> gs.Variable:
        """Return which columns are of tokens, with axes as values of pairs have them."""
        found = self.op.Greater(real, 0.0)
        pairs = [o for n in self.band.nodes for o in n.outputs if self.sizes.is_pair(o)]
        largest = max((stated_sizes(t) or [] for t in pairs), key=len, default=[])
        if not largest:
            raise NotAttentionError("it has no values of pairs that data decide")
        rank, place, heads = len(largest), 0, 1
        if self.batch is not None:
            shares = [(i, size.divided(self.batch)) for i, size in enumerate(largest[:-2])]
            known = [(i, share.known) for i, share in shares if share is not None and share.known]
            if not known or (known[0][1] > 1 and known[0][0]):
                raise NotAttentionError("its values of pairs have no axis of the batch")
            place, heads = known[0]
        shape: list[int | str] = [1] * (rank - 1) + [self.total]
        shape[place] = str(largest[place]) if rank > 2 else 1
        if heads > 1:
            found = self.op.Expand(self.op.Unsqueeze(found, [1]), [1, heads, 1])
            found = self.op.Reshape(found, [-1, 1, 0], shape=[shape[place], 1, self.total])
            places = [*range(1, rank - 2)]
        else:
            places = [i for i in range(rank - 1) if i != place]
        if not places:
            return found
        return self.op.Unsqueeze(found, places, shape=shape)

    def _integer(self, value: int) -> gs.Constant:
        return gs.Constant(self.name("number"), np.asarray(value, np.int64))
