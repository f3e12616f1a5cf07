"""Softmax attention to earlier tokens -> the same with keys and values of past pieces as states.

    softmax(mask + c q k^T) v    becomes    softmax(c q [past_key, k]^T + mask') [past_value, v]

    [s <= t]             all rows are kept: past_key_i grows
    [s <= t] [s > t-w]   the last w - 1 rows are kept

Keys and values that heads of queries share are kept once. past_mask is 0 for rows of no token, as
all are in a window before the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import Pass, PassResult
from linexport.graph.dims import PAST, Shape
from linexport.graph.edit import END, detach, producer
from linexport.graph.monomials import Size, parse
from linexport.graph.states import PAST_MASK, ROWS, is_rows
from linexport.graph.tensors import computed_value, known_shape
from linexport.match.emit.layout import written_size
from linexport.match.errors import NotAttentionError
from linexport.match.search.masked_softmax import MaskedSoftmax, Rows, ScoreMask, SoftmaxReader
from linexport.match.search.shared_rows import HEADS_FIRST, TURNED, SharedRows

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Expose keys and values of every such attention, where other nodes tell the token axis."""
    tokens = sequence_axis.symbol(graph)
    if tokens is None:
        log.debug("no keys are states: no causal node tells the axis of the tokens")
        return PassResult(False)
    dims = {size for t in graph.inputs for size in t.shape or ()}
    if PAST in dims or any(map(is_rows, graph.tensors())):
        log.debug("no keys are states: the graph has a past of its own")
        return PassResult(False)
    reader, found = SoftmaxReader(graph, tokens), []
    for node in [n for n in graph.nodes if n.op == "Softmax"]:
        try:
            found.append(reader.read(node))
        except NotAttentionError as reason:
            log.debug("Softmax %r is left as it is: %s", node.name, reason)
    if found:
        _Writer(graph, tokens, found).write()
        log.info("keys and values of %d softmax attentions are states", len(found))
    return PassResult(bool(found))


class _Writer:
    """Writes states of keys, values and their mask."""

    def __init__(self, graph: gs.Graph, tokens: str, found: list[MaskedSoftmax]) -> None:
        self.graph, self.tokens, self.found = graph, tokens, found
        self._made = 0
        windows = [a.window for a in found]
        self.kept = None if None in windows else max(w - 1 for w in windows if w)
        """Rows that the mask keeps; None for all."""

    def write(self) -> None:
        """Change the graph."""
        key = self.found[0].key
        keys: gs.Tensor
        if key.shared is not None:
            keys, axis = key.shared.rows, 1 if key.shared.tokens_first else 2
        else:
            keys, axis = self._apart(key), key.axis + (key.merged > 1)
        batch, self.count = (
            self._node("Shape", [keys], np.int64, [1], {"start": n, "end": n + 1})
            for n in (0, axis)
        )
        shape = self._node("Concat", [batch, self.count], np.int64, [2], {"axis": 0})
        sizes = [key.sizes[0], self.tokens]
        ones = self._node("Expand", [self._integers(1), shape], np.int64, sizes)
        self.mask = self._kept(PAST_MASK, ones, 1, self.kept)
        for index, attention in enumerate(self.found):
            self._expose(index, attention)

    def _expose(self, index: int, a: MaskedSoftmax) -> None:
        kept = None if a.window is None else a.window - 1
        shared = _of_shared_rows(a)
        for name, rows in zip(ROWS, (a.key, a.value), strict=True):
            own = rows.shared if shared else None
            state = self._prolonged(f"{name}{index}", rows, own, a.dtype, kept)
            rows.node.inputs[rows.place] = state
        for tensor in (*a.before, *a.after):
            computed_value(tensor).shape = [*a.sizes[:-1], self._total(kept)]
        for tensor in (a.before[-1], a.after[0]):
            computed_value(tensor).dtype = np.dtype(a.dtype)
        seen = self._seen(a, kept)
        if a.scale is None:
            for mask in a.masks:
                mask.node.inputs[mask.place] = self._like(mask, seen, a.dtype)
        else:
            self._mask(a, a.scale, seen)
        if shared:
            self._group(a, *shared)

    def _mask(self, a: MaskedSoftmax, scale: float, seen: gs.Variable) -> None:
        """Write scores that are scaled, then masked, and weights that are no more than these.

        Every query sees the key of its own token: no row of weights is of zeros.
        """
        product, clean = a.before[-1], a.after[-1]
        shape = [*a.sizes[:-1], known_shape(seen)[-1]]
        low = float(np.finfo(a.dtype).min)
        numbers = [gs.Constant(self._name(), np.asarray(n, a.dtype)) for n in (scale, 0.0, low)]
        scaled = self._node("Mul", [product, numbers[0]], a.dtype, shape)
        added = self._node("Where", [seen, *numbers[1:]], a.dtype, seen.shape)
        a.softmax.inputs[0] = self._node("Add", [scaled, added], a.dtype, shape)
        a.value.node.inputs = [
            a.softmax.outputs[0] if x is clean else x for x in a.value.node.inputs
        ]
        detach(x.inputs[0] for x in (*a.before[:-1], *a.after[1:]))

    def _group(self, a: MaskedSoftmax, heads: int, served: int) -> None:
        """Multiply the queries of heads that share keys, one below the other, by these."""
        rows = written_size(parse(self.tokens) * Size(served))
        total, width = self._total(None if a.window is None else a.window - 1), a.value.sizes[-1]
        lead = [a.key.sizes[0], heads, rows]
        channels = a.key.shared.width if a.key.shared else 0
        for node, taken, given_back in (
            (a.key.node, channels, total),
            (a.value.node, total, width),
        ):
            given, (made,) = node.inputs[0], node.outputs
            below = self._integers(0, heads, -1, 0)
            node.inputs[0] = self._node("Reshape", [given, below], a.dtype, [*lead, taken])
            grouped = gs.Variable(self._name(), a.dtype, [*lead, given_back])
            node.outputs = [grouped]
            apart = self._integers(0, heads * served, -1, 0)
            self.graph.nodes.append(gs.Node("Reshape", made.name, {}, [grouped, apart], [made]))

    def _prolonged(
        self, name: str, rows: Rows, shared: SharedRows | None, dtype: object, kept: int | None
    ) -> gs.Variable:
        """Return rows behind those of the past, in the layout that their product takes.

        Of rows that heads share it is one copy, which is the state.
        """
        if shared is not None:
            x = self._kept(name, self._heads_first(rows, shared, dtype), 2, kept)
            if rows.axis == 2:
                return x
            *front, row, width = known_shape(x)
            return self._node("Transpose", [x], dtype, [*front, width, row], {"perm": TURNED})
        x = self._apart(rows)
        x.dtype = dtype
        axis, last = rows.axis + (rows.merged > 1), len(known_shape(x)) - 1
        turns = axis == last  # a state has the width of a row last
        perm = {"perm": [*range(last - 1), last, last - 1]}
        if turns:
            before = producer(x, "Transpose")
            *front, row, width = known_shape(x)
            shape = [*front, width, row]
            if before is not None and list(before.attrs["perm"]) == perm["perm"]:
                x = computed_value(before.inputs[0])
                x.dtype, x.shape = dtype, shape
            else:
                x = self._node("Transpose", [x], dtype, shape, dict(perm))
        x = self._kept(name, x, last - 1 if turns else axis, kept)
        if turns:
            *front, row, width = known_shape(x)
            x = self._node("Transpose", [x], dtype, [*front, width, row], perm)
        return self._merged(x, rows.merged) if rows.merged > 1 else x

    def _heads_first(self, rows: Rows, shared: SharedRows, dtype: object) -> gs.Variable:
        """Return one copy of rows that heads share, (B, G, T, d)."""
        shape, x = (
            [rows.sizes[0], shared.heads, self.tokens, shared.width],
            computed_value(shared.rows),
        )
        x.dtype = dtype
        if shared.tokens_first:
            return self._node("Transpose", [x], dtype, shape, {"perm": HEADS_FIRST})
        x.shape = shape
        return x

    def _apart(self, rows: Rows) -> gs.Variable:
        """Return rows with the batch as the first axis."""
        x, (batch, *rest) = computed_value(rows.node.inputs[rows.place]), rows.sizes
        if rows.merged == 1:
            x.shape = [batch, *rest]
            return x
        sizes: list[gs.Tensor] = [self._integers(-1, rows.merged)]
        for place, size in enumerate(rest, 1):
            own = {"start": place, "end": place + 1}
            sizes.append(
                self._node("Shape", [x], np.int64, [1], own)
                if size == self.tokens
                else self._integers(int(size))
            )
        shape = self._node("Concat", sizes, np.int64, [2 + len(rest)], {"axis": 0})
        return self._node("Reshape", [x, shape], x.dtype, [batch, rows.merged, *rest])

    def _merged(self, x: gs.Variable, heads: int) -> gs.Variable:
        """Return (B, heads, ...) as (B heads, ...)."""
        batch, _, *rest = known_shape(x)
        own = self._node(
            "Shape", [x], np.int64, [len(rest)], {"start": 2, "end": len(known_shape(x))}
        )
        shape = self._node(
            "Concat", [self._integers(-1), own], np.int64, [1 + len(rest)], {"axis": 0}
        )
        return self._node("Reshape", [x, shape], x.dtype, [f"{heads}*{batch}", *rest])

    def _kept(self, name: str, rows: gs.Tensor, axis: int, kept: int | None) -> gs.Variable:
        """Return past and present rows, and have those of them that are kept be the next past."""
        past_shape, shape = list(known_shape(rows)), list(known_shape(rows))
        past_shape[axis], shape[axis] = PAST if kept is None else kept, self._total(kept)
        past = gs.Variable(name, rows.dtype, past_shape)
        present = gs.Variable(name.replace(PAST, "present", 1), rows.dtype, past_shape)
        joined = present if kept is None else gs.Variable(self._name(), rows.dtype, shape)
        self.graph.inputs.append(past)
        self.graph.outputs.append(present)
        inputs = [past, rows]
        self.graph.nodes.append(gs.Node("Concat", joined.name, {"axis": axis}, inputs, [joined]))
        if kept is None:
            joined.shape = shape
            return joined
        ends = [self._integers(n) for n in (-kept, END, axis)]
        self.graph.nodes.append(gs.Node("Slice", present.name, {}, [joined, *ends], [present]))
        return joined

    def _seen(self, a: MaskedSoftmax, kept: int | None) -> gs.Variable:
        """Return (B, 1.., T, past + T), true where a query sees a key."""
        total, boolean, batch = self._total(kept), np.bool_, a.key.sizes[0]
        own = self.mask if kept == self.kept else self._last(kept)
        real = self._node("Greater", [own, self._integers(0)], boolean, [batch, total])
        ones = len(a.sizes) - 2 + (a.key.merged > 1)
        shape = [batch, *[1] * ones, total]
        places = self._integers(*range(1, 1 + ones))
        real = self._node("Unsqueeze", [real, places], boolean, shape)
        length = self._node("Shape", [own], np.int64, [1], {"start": 1, "end": 2})
        end = self._node("Squeeze", [length], np.int64, [])
        zero, one = self._number(0), self._number(1)
        columns = self._node("Range", [zero, end, one], np.int64, [total])
        first = self._node("Neg", [self.count], np.int64, [1])
        ends = [first, self._integers(END), self._integers(0)]
        rows = self._node("Slice", [columns, *ends], np.int64, [self.tokens])
        rows = self._node("Unsqueeze", [rows, self._integers(1)], np.int64, [self.tokens, 1])
        pairs = [self.tokens, total]
        seen = self._node("LessOrEqual", [columns, rows], boolean, pairs)
        if a.window is not None:
            lowest = self._node("Sub", [rows, self._integers(a.window)], np.int64, rows.shape)
            late = self._node("Greater", [columns, lowest], boolean, pairs)
            seen = self._node("And", [seen, late], boolean, pairs)
        seen = self._node("And", [seen, real], boolean, [*shape[:-2], *pairs])
        if a.key.merged == 1:
            return seen
        heads = self._integers(1, a.key.merged, 1, 1)
        each = [batch, a.key.merged, *pairs]
        return self._merged(self._node("Expand", [seen, heads], boolean, each), a.key.merged)

    def _last(self, kept: int | None) -> gs.Variable:
        """Return the mask of the last rows, with zeros for those that are not there."""
        assert kept is not None
        batch = known_shape(self.mask)[0]
        pads = self._integers(0, kept, 0, 0)
        padded = self._node("Pad", [self.mask, pads], np.int64, None)
        length = self._node("Add", [self.count, self._integers(kept)], np.int64, [1])
        first = self._node("Neg", [length], np.int64, [1])
        ends = [first, self._integers(END), self._integers(1)]
        return self._node("Slice", [padded, *ends], np.int64, [batch, self._total(kept)])

    def _like(
        self, mask: ScoreMask, seen: gs.Variable, dtype: np.dtype[np.generic] | type[np.generic]
    ) -> gs.Variable:
        """Return a mask in the form that a node takes it."""
        if mask.fill is not None:
            numbers = (gs.Constant(self._name(), np.asarray(n, dtype)) for n in (0.0, mask.fill))
            return self._node("Where", [seen, *numbers], dtype, seen.shape)
        return seen if mask.keeps else self._node("Not", [seen], np.bool_, seen.shape)

    def _total(self, kept: int | None) -> str:
        return f"{PAST if kept is None else kept}+{self.tokens}"

    def _integers(self, *values: int) -> gs.Constant:
        return gs.Constant(self._name(), np.asarray(values, np.int64))

    def _number(self, value: int) -> gs.Constant:
        return gs.Constant(self._name(), np.asarray(value, np.int64))

    def _name(self) -> str:
        self._made += 1
        return f"key_values/{self._made}"

    def _node(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        dtype: object,
        shape: Shape | None,
        attrs: Mapping[str, object] | None = None,
    ) -> gs.Variable:
        result = gs.Variable(self._name(), dtype, shape)
        self.graph.nodes.append(gs.Node(op, result.name, attrs or {}, inputs, [result]))
        return result


def _of_shared_rows(a: MaskedSoftmax) -> tuple[int, int] | None:
    """Return the number of heads of keys, and of queries that share one; None if none do."""
    key, value = a.key.shared, a.value.shared
    if key is None or value is None or len(a.sizes) != 4 or a.value.place != 1:
        return None
    sizes = key.heads, key.served
    return sizes if sizes == (value.heads, value.served) and key.served > 1 else None


PASS = Pass(
    name="expose_key_values",
    stage="stream",
    requires="linear attention is fused: its nodes tell which axis holds the tokens",
    ensures="softmax attention to earlier tokens takes rows of past pieces and gives those to keep",
    run=run,
)
