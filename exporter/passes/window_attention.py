"""Exponentials or softmax of scores over the last w tokens -> ``WindowAttention``.

    sum_s a_ts v_s, sum_s a_ts      becomes      n = exp(maximum) total,  n output

for a_ts = exp(q_t.k_s) at 0 <= t - s < w, see ``match.search.window_softmax``. Scores then exist
for blocks of queries and not for all pairs of tokens, and the state is a ring of w rows. Both sides
are run on random inputs and compared. Where no other node tells the axis of tokens, nothing is
changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.builder import NodeBuilder
from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import detach, nodes_behind
from linexport.graph.monomials import parse
from linexport.graph.operators import SIZES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.run_subgraph import NotRunnableError, session
from linexport.graph.shapes import completed_shapes
from linexport.graph.tensors import known_shape
from linexport.match.emit.candidate import inputs_of
from linexport.match.errors import NotAttentionError
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.token_sizes import LARGEST, TokenSizes, imports_of, numbers, shape_at
from linexport.match.search.bands import BandReader
from linexport.match.search.in_pieces import nearly_equal
from linexport.match.search.shared_rows import SharedRows, find_shared_rows
from linexport.match.search.window_softmax import WindowEnd, WindowSoftmax, exponential_bands
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.window_attention import OP

log = logging.getLogger(__name__)

FLOAT = np.dtype(np.float32)


def run(graph: gs.Graph) -> PassResult:
    """Replace every such band that is proven to be the same."""
    length = sequence_axis.symbol(graph)
    if length is None:
        log.debug("no window becomes a node: no causal node tells the axis of the tokens")
        return PassResult(False)
    with completed_shapes(graph):
        changed = _Windows(graph, length).write()
    if changed:
        graph.cleanup().toposort()
    return PassResult(changed)


class _Windows:
    """Bands of exponentials in a graph, and their replacement."""

    def __init__(self, graph: gs.Graph, length: str) -> None:
        self.graph, self.sizes = graph, TokenSizes(length)
        given = next(t for t in graph.inputs if length in (t.shape or ()))
        self.batch = parse(known_shape(given)[0])
        self.imports = imports_of(graph)
        self.place = {id(node): i for i, node in enumerate(graph.nodes)}

    def write(self) -> bool:
        """Change the graph; returns whether there was anything to change."""
        written, reader = False, BandReader(self.graph, self.sizes)
        for found in list(exponential_bands(reader)):
            if isinstance(found, NotAttentionError):
                log.debug("a sum over pairs of tokens is left as it is: %s", found)
                continue
            name = found.ends[0].tensor.name
            try:
                writer = _Writer(found, reader.evaluator)
                self._check_batch(found)
                writer.write()
                self._prove(writer)
            except NotAttentionError as reason:
                log.debug("%s is not made a WindowAttention: %s", name, reason)
                continue
            self._place(writer)
            log.info("%s is softmax over the last %d tokens", name, found.window)
            written = True
        return written

    def _check_batch(self, found: WindowSoftmax) -> None:
        for tensor, letters in (found.query, found.key, found.value):
            sizes = stated_sizes(tensor)
            if sizes is None or sizes[letters.index("b")] != self.batch:
                raise NotAttentionError(f"the first axis of {tensor.name} is not the batch")

    def _prove(self, writer: _Writer) -> None:
        """Run both sides on random inputs.

        Raises:
            NotAttentionError: they differ, or do not run on their own.
        """
        band, window = writer.found.band, writer.found.window
        masks = [tensor for tensor, _ in band.masks.values()]
        before = nodes_behind(masks, SIZES_ONLY, band.nodes)
        before = sorted(before, key=lambda n: self.place[id(n)])
        given = [t for t in inputs_of(before, writer.nodes) if t not in writer.results]
        if any(stated_sizes(t) is None or t.dtype is None for t in given):
            raise NotAttentionError("the sizes of what it reads are not known")
        random, compared = np.random.default_rng(window), 0
        for tokens in (1, window // 2 + 1, window + 2, 2 * window + 5):
            symbols = self.sizes.at(self.sizes.whole(tokens), given)
            try:
                values = {t.name: numbers(random, shape_at(t, symbols), t.dtype) for t in given}
                values |= {name: copied(values) for name, copied in writer.copies.items()}
                pairs = [o for n in band.nodes for o in n.outputs if self.sizes.is_pair(o)]
                if any(math.prod(shape_at(o, symbols)) > LARGEST for o in pairs):
                    continue
                for end, result in zip(writer.found.ends, writer.results, strict=True):
                    (want,) = session(given, before, end.tensor, self.imports).run(None, values)
                    (got,) = session(given, writer.nodes, result, self.imports).run(None, values)
                    if got.shape != want.shape or not nearly_equal(got, want):
                        raise NotAttentionError(f"{end.tensor.name} differs at {tokens} tokens")
            except NotRunnableError as error:
                raise NotAttentionError(str(error)) from None
            compared += 1
        if compared < 2:
            raise NotAttentionError("its values of pairs are too large to be compared")

    def _place(self, writer: _Writer) -> None:
        """Put the node in the place of the band."""
        for node in writer.found.band.nodes:
            node.outputs = []
        for end, result in zip(writer.found.ends, writer.results, strict=True):
            same = gs.Node("Identity", f"{result.name}/end", {}, [result], [end.tensor])
            writer.nodes.append(same)
        self.graph.nodes += writer.nodes


Copies = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""Computes a value of those of other names."""


def _copied(rows: SharedRows, letters: str, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return copies of rows, with axes in the order of letters."""
    found = rows.repeated(values[rows.rows.name])
    return found.transpose(["bhnd".index(c) for c in letters.replace("e", "d")])


class _Writer(NodeBuilder):
    """Writes one band as a node.

    Args:
        found: the band.
        evaluator: of the graph.

    Attributes:
        results: values of the ends, in their order.
        copies: what keys and values are that the node reads once for several heads, by name, of
            the values that it reads.
    """

    def __init__(self, found: WindowSoftmax, evaluator: Evaluator) -> None:
        super().__init__(f"{found.ends[0].tensor.name}/window")
        self.found, self.has_heads = found, len(found.query[1]) == 4
        self.key, self.value = found.key, found.value
        self.results: list[gs.Variable] = []
        self.copies: dict[str, Copies] = {}
        self._share(evaluator)

    def _share(self, evaluator: Evaluator) -> None:
        """Read keys and values before they are repeated for the heads that share them."""
        given = self.key, self.value
        shared = [find_shared_rows(evaluator, t) if self.has_heads else None for t, _ in given]
        key, value = shared
        if key is None or value is None or key.heads != value.heads:
            return
        for (tensor, letters), rows in zip(given, (key, value), strict=True):
            self.copies[tensor.name] = partial(_copied, rows, letters)
        self.key = key.rows, key.letters
        self.value = value.rows, value.letters.replace("d", "e")

    def write(self) -> None:
        """Write all nodes.

        Raises:
            NotAttentionError: sizes that a node needs are not known, or heads do not share keys.
        """
        found = self.found
        try:
            self._write()
        except NotAttentionError:
            detach(self.nodes)
            raise
        assert len(self.results) == len(found.ends)

    def _write(self) -> None:
        (query, heads), (key, kv_heads), (value, value_heads) = (
            self._packed(self.found.query, "m", "d"),
            self._packed(self.key, "n", "d"),
            self._packed(self.value, "n", "e"),
        )
        if kv_heads != value_heads or heads % kv_heads:
            raise NotAttentionError(f"{heads} heads have {kv_heads} keys and {value_heads} values")
        width = self._size(self.found.value, "e")
        batch, length = known_shape(query)[:2]
        dtype = np.dtype(query.dtype)
        output = gs.Variable(self.name("output"), dtype, [batch, length, heads * width])
        maximum, total = (
            gs.Variable(self.name(n), FLOAT, [batch, length, heads]) for n in ("maximum", "total")
        )
        attributes = {
            "q_num_heads": heads,
            "kv_num_heads": kv_heads,
            "window": self.found.window,
            "scale": float(self.found.scale),
        }
        node = gs.Node(OP.name, f"{output.name}/{OP.name}", attributes, [query, key, value])
        node.domain, node.outputs = DOMAIN, [output, maximum, total]
        self.nodes.append(node)
        mean = self.op.Reshape(output, [0, 0, heads, width]) if self.has_heads else output
        mean = self.op.Transpose(mean, perm=[0, 2, 1, 3]) if self.has_heads else mean
        top, sums = (self._by_row(x, dtype) for x in (maximum, total))
        for end in self.found.ends:
            self.results.append(self._ended(end, mean, top, sums))

    def _size(self, given: tuple[gs.Tensor, str], letter: str) -> int:
        tensor, letters = given
        size = known_shape(tensor)[letters.index(letter)]
        if not isinstance(size, int):
            raise NotAttentionError(f"a size of {tensor.name} is not known: {size}")
        return size

    def _packed(
        self, given: tuple[gs.Tensor, str], token: str, width: str
    ) -> tuple[gs.Tensor, int]:
        """Return a tensor as (B, T, heads * width), and its heads."""
        tensor, letters = given
        if np.dtype(tensor.dtype) != np.dtype(self.found.query[0].dtype):
            raise NotAttentionError(f"{tensor.name} has another type than the queries")
        order = f"b{token}h{width}" if self.has_heads else f"b{token}{width}"
        perm = [letters.index(c) for c in order]
        moved = tensor if perm == sorted(perm) else self.op.Transpose(tensor, perm=perm)
        if not self.has_heads:
            return moved, 1
        heads, size = self._size(given, "h"), self._size(given, width)
        return self.op.Reshape(moved, [0, 0, heads * size]), heads

    def _by_row(self, x: gs.Variable, dtype: np.dtype[np.generic]) -> gs.Variable:
        """Return a number of each query (B, T, heads) as (B, heads, T, 1), or (B, T, 1)."""
        if self.has_heads:
            x = self.op.Unsqueeze(self.op.Transpose(x, perm=[0, 2, 1]), [3])
        return x if dtype == FLOAT else self.op.CastLike(x, self.found.query[0])

    def _ended(
        self, end: WindowEnd, mean: gs.Variable, top: gs.Variable, sums: gs.Variable
    ) -> gs.Variable:
        weights, found = end.weights, mean
        if end.quantity != "sum":
            found = top if end.quantity == "maximum" else self.op.Add(top, self.op.Log(sums))
        elif not weights.softmax:
            sums = sums if weights.shifted else self.op.Mul(sums, self.op.Exp(top))
            found = self.op.Mul(mean, sums) if end.letters else sums
        for factor in weights.factors:
            found = self.op.Mul(found, factor)
        if not end.kept:
            return self.op.Squeeze(found, [-1])
        own = "bhme" if self.has_heads else "bme"
        if end.letters and end.letters != own:
            found = self.op.Transpose(found, perm=[own.index(c) for c in end.letters])
        return self.op.Identity(found) if found is mean or found is top else found


PASS = Pass(
    name="window_attention",
    stage="scan",
    requires="linear attention is fused: its nodes tell which axis holds the tokens",
    ensures="exponentials of scores over the last tokens are nodes, beside linear attention",
    run=run,
)
