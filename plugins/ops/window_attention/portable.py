"""WindowAttention in standard operators, in blocks of C queries.

    block n     queries nC ... nC + C - 1, and the C + w - 1 rows of [past, key] that they see

C is at most the number of tokens: one token is compared with w rows. Nothing has the size T x T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body, ceil_div
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.window_attention.definition import LOWEST, WindowSpec

END = np.iinfo(np.int64).max


def portable(node: Node) -> tuple[Body, list[str]]:
    """Write the body; half precision is computed in float32."""
    b = Body()
    spec = WindowSpec.from_attributes(node.attributes)
    widths = spec.check(**node.shapes)
    written = _Writer(b, spec, widths, node)
    return b, written.outputs()


@dataclass(frozen=True)
class _Cut:
    """Blocks of a call: number of tokens, sizes C and J, and tokens and rows of each block.

    The last token and the last row stand for those that the last block lacks: its queries behind
    the last token are cut off, and no other sees later rows.
    """

    length: str
    size: str
    columns: str
    queries: str
    index: str


class _Writer:
    """Writes one body."""

    def __init__(self, b: Body, spec: WindowSpec, widths: tuple[int, int], node: Node) -> None:
        self.b, self.spec, (self.d_k, self.d_v) = b, spec, widths
        self.keys, self.values = (spec.kv_num_heads * d for d in widths)
        query, key, value, *pasts, self.mask = node.inputs
        self.query, self.key, self.value, self.pasts = query, key, value, pasts
        self.batch = b.Shape(query, start=0, end=1)
        self.cut = self._cut()

    def outputs(self) -> list[str]:
        """Return the values of the op's outputs, in order."""
        b, length = self.b, self.cut.length
        keys = b.Concat(self._past(0, self.key, self.spec.window, self.keys), self.key, axis=1)
        values = b.Concat(
            self._past(1, self.value, self.spec.window, self.values), self.value, axis=1
        )
        ones = b.Expand(b.const(1.0), b.Concat(self.batch, length, axis=0))
        flags = b.Cast(self.mask, to=TensorProto.FLOAT) if self.mask else ones
        seen = b.Concat(self._past(2, "", self.spec.window), flags, axis=1)
        first = (b.const([0]), length, b.const([1]))
        rest = (length, b.const([END]), b.const([1]))
        left_key, left_value, left = (b.Slice(x, *first) for x in (keys, values, seen))
        is_left, sinks, present_left = b.Greater(left, b.const(0.0)), _NO_SINKS, ""
        if self.spec.sinks:
            sinks, rank = self._sinks(left, left_key, left_value)
            is_left = b.And(is_left, b.Greater(rank, b.const(float(self.spec.sinks))))
            last = b.ReduceMax(b.Concat(self._past(5, "", 1), rank, axis=1), b.const([1]))
            present_left = b.Min(last, b.const(float(self.spec.sinks)))
        else:
            present_left = self._zeros(1)
        output, maximum, total = self._attend(keys, values, seen, sinks)
        rings = [b.Slice(x, *rest) for x in (keys, values, seen)]
        sink_rows = [
            b.CastLike(x, of) if x else b.CastLike(self._zeros(0, width), of)
            for x, of, width in (
                (sinks.key, self.key, self.keys),
                (sinks.value, self.value, self.values),
            )
        ]
        output = b.CastLike(output, self.value)
        found = [output, maximum, total, left_key, left_value, is_left]
        return [*found, *rings, *sink_rows, present_left]

    def _zeros(self, *sizes: int) -> str:
        b = self.b
        return str(b.Expand(b.const(0.0), b.Concat(self.batch, b.const(list(sizes)), axis=0)))

    def _past(self, place: int, like: str, *sizes: int) -> str:
        """Return a past, or zeros in the type of ``like``, float32 where that is empty."""
        if self.pasts[place]:
            return self.pasts[place]
        zeros = self._zeros(*sizes)
        return str(self.b.CastLike(zeros, like)) if like else zeros

    def _cut(self) -> _Cut:
        b, window = self.b, self.spec.window
        length, one = b.Shape(self.query, start=1, end=2), b.const([1])
        size = b.Max(b.Min(length, b.const([self.spec.block])), one)
        count = ceil_div(b, length, size)
        columns = b.Add(size, b.const([window - 1]))
        starts = b.Unsqueeze(b.Mul(self._range(count), size), one)
        last = b.Sub(length, one)
        queries = b.Min(b.Add(starts, self._range(size)), last)
        rows = b.Add(b.Add(starts, self._range(columns)), one)
        index = b.Min(rows, b.Add(last, b.const([window])))
        return _Cut(length, size, columns, queries, index)

    def _range(self, count: str) -> str:
        b, axis = self.b, self.b.const([0])
        return str(b.Range(b.const(0), b.Squeeze(count, axis), b.const(1)))

    def _sinks(self, left: str, left_key: str, left_value: str) -> tuple[_Sinks, str]:
        """Return the sinks after the call, and the number of tokens that left by each token."""
        b, count = self.b, self.spec.sinks
        rank = b.Add(self._past(5, "", 1), b.CumSum(left, b.const(1)))
        places = b.const(np.arange(1.0, count + 1).reshape(1, count, 1))
        row = b.Unsqueeze(rank, b.const([1]))
        enters = b.Cast(b.Equal(row, places), to=TensorProto.FLOAT)
        enters = b.Mul(enters, b.Unsqueeze(left, b.const([1])))
        rows = [
            b.Add(self._float(past), b.MatMul(enters, self._float(x)))
            for past, x in (
                (self._past(3, self.key, count, self.keys), left_key),
                (self._past(4, self.value, count, self.values), left_value),
            )
        ]
        visible = b.GreaterOrEqual(
            b.Unsqueeze(rank, b.const([2])), b.const(np.arange(1.0, count + 1).reshape(1, 1, count))
        )
        return _Sinks(rows[0], rows[1], visible), str(rank)

    def _float(self, x: str) -> str:
        return str(self.b.Cast(x, to=TensorProto.FLOAT))

    def _rows(self, x: str, width: int) -> str:
        """Return the rows of every block, (B, H_k, N, J, width)."""
        b, heads = self.b, self.spec.kv_num_heads
        found = b.Gather(self._float(x), self.cut.index, axis=1)
        split = b.Reshape(found, b.const([0, 0, 0, heads, width]))
        return str(b.Transpose(split, perm=[0, 3, 1, 2, 4]))

    def _queries(self) -> str:
        """Return the queries of heads that share keys side by side, (B, H_k, N, d, G * C)."""
        b, spec, shared = self.b, self.spec, self.spec.shared
        scaled = b.Mul(self._float(self.query), b.const(spec.scale))
        found = b.Gather(scaled, self.cut.queries, axis=1)
        split = b.Reshape(found, b.const([0, 0, 0, spec.kv_num_heads, shared, self.d_k]))
        moved = b.Transpose(split, perm=[0, 3, 1, 5, 4, 2])
        return str(b.Reshape(moved, b.const([0, 0, 0, 0, -1])))

    def _scores(self, q: str, keys: str) -> str:
        """Return scores (B, H_k, N, G, C, J) of keys (B, H_k, N or 1, J, d).

        Products of keys and queries are transposed, as keys are the larger of both.
        """
        b = self.b
        products = b.Transpose(b.MatMul(keys, q), perm=[0, 1, 2, 4, 3])
        return str(b.Reshape(products, self._apart()))

    def _apart(self) -> str:
        """Return the shape that splits axis 3 into G and C."""
        b, shared = self.b, self.spec.shared
        return str(b.Concat(b.const([0, 0, 0, shared]), self.cut.size, b.const([-1]), axis=0))

    def _attend(self, keys: str, values: str, seen: str, sinks: _Sinks) -> tuple[str, str, str]:
        b, cut, one, last = self.b, self.cut, self.b.const([1]), self.b.const([-1])
        q = self._queries()
        i = b.Unsqueeze(self._range(cut.size), one)
        distance = b.Sub(b.Unsqueeze(self._range(cut.columns), b.const([0])), i)
        band = b.And(
            b.GreaterOrEqual(distance, b.const(0)), b.Less(distance, b.const(self.spec.window))
        )
        real = b.Greater(b.Gather(seen, cut.index, axis=1), b.const(0.0))
        visible = b.And(b.Unsqueeze(real, b.const([1, 3, 4])), band)
        lowest = b.const(LOWEST)
        scores = b.Where(visible, self._scores(q, self._rows(keys, self.d_k)), lowest)
        if sinks.key:
            first = b.Where(self._sinks_seen(sinks), self._scores(q, self._sink(sinks.key)), lowest)
            scores = b.Concat(scores, first, axis=-1)
        maximum = b.ReduceMax(scores, last, keepdims=1)
        shares = b.Softmax(scores, axis=-1)
        # The largest share is that of the largest score, 1 / total.
        total = b.Reciprocal(b.ReduceMax(shares, last, keepdims=1))
        # Without any key all scores are LOWEST, and all shares alike.
        some = b.Cast(b.Greater(maximum, b.const(LOWEST / 2)), to=TensorProto.FLOAT)
        rows = b.Reshape(shares, b.Concat(b.const([0, 0, 0, -1]), b.Shape(shares, start=5), axis=0))
        near = self._rows(values, self.d_v)
        if sinks.key:
            own = b.Slice(rows, b.const([0]), cut.columns, last)
            first = b.Slice(rows, cut.columns, b.const([END]), last)
            sums = b.Add(b.MatMul(own, near), b.MatMul(first, self._sink(sinks.value)))
        else:
            sums = b.MatMul(rows, near)
        output = b.Mul(b.Reshape(sums, self._apart()), some)
        found = ((output, self.d_v), (maximum, 1), (b.Mul(total, some), 1))
        return tuple(self._tokens(x, width) for x, width in found)  # type: ignore[return-value]

    def _sink(self, x: str) -> str:
        """Return rows (B, s, H_k * width) as (B, H_k, 1, s, width)."""
        b, spec = self.b, self.spec
        split = b.Reshape(x, b.const([0, 1, spec.sinks, spec.kv_num_heads, -1]))
        return str(b.Transpose(split, perm=[0, 3, 1, 2, 4]))

    def _sinks_seen(self, sinks: _Sinks) -> str:
        """Return which sinks each query sees, (B, 1, N, 1, C, s)."""
        b = self.b
        after = b.Gather(self._float(sinks.visible), self.cut.queries, axis=1)
        return str(b.Unsqueeze(b.Greater(after, b.const(0.5)), b.const([1, 3])))

    def _tokens(self, x: str, width: int) -> str:
        """Return (B, T, H * width) of (B, H_k, N, G, C, width)."""
        b = self.b
        moved = b.Transpose(x, perm=[0, 2, 4, 1, 3, 5])
        packed = b.Concat(
            self.batch, b.const([-1]), b.const([self.spec.q_num_heads * width]), axis=0
        )
        whole = b.Reshape(moved, packed)
        return str(b.Slice(whole, b.const([0]), self.cut.length, b.const([1])))


@dataclass(frozen=True)
class _Sinks:
    """Keys and values (B, s, width) after a call, and which of them each token sees, (B, T, s)."""

    key: str
    value: str
    visible: str


_NO_SINKS = _Sinks("", "", "")
