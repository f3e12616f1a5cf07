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
TINY = float(np.finfo(np.float32).tiny)


def portable(node: Node) -> tuple[Body, list[str]]:
    """Write the body; half precision is computed in float32."""
    b = Body()
    spec = WindowSpec.from_attributes(node.attributes)
    widths = spec.check(**node.shapes)
    written = _Writer(b, spec, widths, node)
    return b, written.outputs()


@dataclass(frozen=True)
class _Cut:
    """Blocks of a call: number of tokens, sizes C and J, padding, and rows of each (N, J)."""

    length: str
    size: str
    columns: str
    missing: str
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
        starts = b.Mul(self._range(count), size)
        index = b.Add(b.Add(b.Unsqueeze(starts, one), self._range(columns)), one)
        return _Cut(length, size, columns, b.Sub(b.Mul(count, size), length), index)

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

    def _padded(self, x: str, rank: int) -> str:
        """Pad axis 1 at its end, so that it is whole blocks."""
        b = self.b
        before = b.const([0] * (rank + 1))
        after = b.const([0] * (rank - 2)) if rank > 2 else None
        pads = b.Concat(*filter(None, (before, self.cut.missing, after)), axis=0)
        return str(b.Pad(x, pads))

    def _rows(self, x: str, width: int, order: list[int]) -> str:
        """Return the rows of every block in an order of (B, N, J, H_k, width)."""
        b, heads = self.b, self.spec.kv_num_heads
        found = b.Gather(self._padded(self._float(x), 3), self.cut.index, axis=1)
        return str(b.Transpose(b.Reshape(found, b.const([0, 0, 0, heads, width])), perm=order))

    def _attend(self, keys: str, values: str, seen: str, sinks: _Sinks) -> tuple[str, str, str]:
        b, spec, cut = self.b, self.spec, self.cut
        heads, shared, minus = spec.kv_num_heads, spec.shared, b.const([-1])
        one = b.const([1])
        query = b.Mul(self._float(self.query), b.const(spec.scale))
        split = b.Concat(self.batch, minus, cut.size, b.const([heads, shared, self.d_k]), axis=0)
        q = b.Reshape(self._padded(query, 3), split)
        # (B, H_k, N, G * C, d): the queries of all heads that share keys, one below the other.
        q = b.Transpose(q, perm=[0, 3, 1, 4, 2, 5])
        merged = b.Concat(
            b.const([0, 0, 0]), b.Mul(cut.size, b.const([shared])), b.const([self.d_k]), axis=0
        )
        q = b.Reshape(q, merged)
        scores = b.MatMul(q, self._rows(keys, self.d_k, [0, 3, 1, 4, 2]))
        apart = b.Concat(b.const([0, 0, 0, shared]), cut.size, minus, axis=0)
        scores = b.Reshape(scores, apart)
        i = b.Unsqueeze(self._range(cut.size), one)
        j = b.Unsqueeze(self._range(cut.columns), b.const([0]))
        distance = b.Sub(j, i)
        band = b.And(b.GreaterOrEqual(distance, b.const(0)), b.Less(distance, b.const(spec.window)))
        real = b.Greater(b.Gather(self._padded(seen, 2), cut.index, axis=1), b.const(0.0))
        visible = b.And(b.Unsqueeze(real, b.const([1, 3, 4])), band)
        parts = [(b.Where(visible, scores, b.const(LOWEST)), visible)]
        rows = [self._rows(values, self.d_v, [0, 3, 1, 2, 4])]
        if sinks.key:
            scores, visible, value = self._sink_scores(q, sinks, apart)
            parts.append((b.Where(visible, scores, b.const(LOWEST)), visible))
            rows.append(value)
        maximum = b.Max(*(b.ReduceMax(s, minus, keepdims=1) for s, _ in parts))
        weights = [b.Where(visible, b.Exp(b.Sub(s, maximum)), b.const(0.0)) for s, visible in parts]
        total = _sum(b, [b.ReduceSum(w, minus, keepdims=1) for w in weights])
        below = b.Concat(b.const([0, 0, 0]), b.Mul(cut.size, b.const([shared])), minus, axis=0)
        sums = _sum(
            b, [b.MatMul(b.Reshape(w, below), v) for w, v in zip(weights, rows, strict=True)]
        )
        output = b.Div(b.Reshape(sums, apart), b.Max(total, b.const(TINY)))
        widths = (self.d_v, 1, 1)
        found = [self._tokens(x, w) for x, w in zip((output, maximum, total), widths, strict=True)]
        return found[0], found[1], found[2]

    def _sink_scores(self, q: str, sinks: _Sinks, apart: str) -> tuple[str, str, str]:
        """Return scores (B, H_k, N, G, C, s), which count, and values (B, H_k, 1, s, d_v)."""
        b, heads, count = self.b, self.spec.kv_num_heads, self.spec.sinks
        key, value = (
            b.Reshape(x, b.const([0, 1, count, heads, width]))
            for x, width in ((sinks.key, self.d_k), (sinks.value, self.d_v))
        )
        scores = b.MatMul(q, b.Transpose(key, perm=[0, 3, 1, 4, 2]))
        after = self._padded(self._float(sinks.visible), 3)
        split = b.Concat(self.batch, b.const([-1]), self.cut.size, b.const([count]), axis=0)
        visible = b.Greater(b.Reshape(after, split), b.const(0.5))
        visible = b.Unsqueeze(visible, b.const([1, 3]))
        return b.Reshape(scores, apart), visible, b.Transpose(value, perm=[0, 3, 1, 2, 4])

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


def _sum(b: Body, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else str(b.Add(*parts))
