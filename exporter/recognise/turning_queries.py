"""Queries and keys of a convolution whose kernel is a sum of complex exponentials, as nodes.

    y_t = sum_{s <= t, n} exp(a_n (t - s)) (c_n cos b_n (t - s) - d_n sin b_n (t - s)) u_s
    W_t = b (T - 1 - t)

    key_s   = (cos W_s, sin W_s)                                  of every channel n
    query_t = (c cos W_t + d sin W_t, c sin W_t - d cos W_t)      Re (c + id) e^{i (W_s - W_t)}
    g_0     = e^{i b T} h_0

As angles are counted from the last token of a call, where W is 0, the state that is carried on is
that of h_t = e^{a + ib} h_{t-1} + u_t, and nothing of it grows with the number of tokens. Angles
are in float64, in turns, less whole ones. W_t of t = 64 i + j is that of 64 i less b j: cosines are
computed of every 64th token and of 64 distances, which depend on the weights alone.
"""

from __future__ import annotations

import math
import re

import numpy as np
import onnx_graphsurgeon as gs

from linexport.plugins.ops import linear_attention
from linexport.recognise.axes import size_of
from linexport.recognise.gates import FLOAT
from linexport.recognise.head_layout import axis_size
from linexport.recognise.nodes import written_size
from linexport.recognise.roles import NotAttentionError, Turn
from linexport.recognise.signed import LARGE, SignedGates
from linexport.recognise.terms import Iota, Leaf

DOUBLE = np.dtype(np.float64)

BLOCK = 64
"""Tokens of a block."""


class TurningQueries(SignedGates):
    """Writes the inputs of an operator whose channels turn."""

    def turning_inputs(self, dtype: np.dtype[np.generic]) -> list[gs.Tensor]:
        """Return all inputs of the operator.

        Raises:
            NotAttentionError: an angle is no multiple of positions, or a decay may be negative.
        """
        roles, heads = self.roles, self.layout.value
        assert roles.turn is not None
        if self.rates(dtype) is not None:
            raise NotAttentionError("its channels turn, and their decays may be negative")
        rate = self.constant_rates()
        if rate is None:
            raise NotAttentionError(
                "its channels turn, and their decays differ from token to token"
            )
        count = axis_size(heads)
        turn = self._per_turn(roles.turn)
        query, key = (self.cast(x, dtype) for x in self._features(roles.turn, turn))
        names = linear_attention.OP.input_names
        inputs: list[gs.Tensor] = [gs.Variable.empty()] * len(names)
        value = self.packed("value", roles.value, heads, roles.widths, dtype)
        decay = self.everywhere(np.ones((1, 1, count), dtype), heads, roles.key_position)
        given = {"query": query, "key": key, "value": value, "decay": decay}
        given["decay_scale"] = self._beside(rate, rate)
        given["past_state"] = self._turned_beginning(turn)
        for name, tensor in given.items():
            inputs[names.index(name)] = tensor
        return inputs

    def _per_turn(self, turn: Turn) -> gs.Tensor:
        """Return b in turns, (heads, channels)."""
        others = [f for f in turn.angle.factors if not isinstance(f, Leaf)]
        if others != [Iota(self.roles.query_position)]:
            raise NotAttentionError("its angles are no multiples of positions")
        return self._op("Mul", self.stored([turn.angle], DOUBLE), 0.5 / math.pi)

    def _size_of(self, what: str) -> str:
        """Return the name of a size that follows from the number of tokens, of it alone."""
        length = str(written_size(size_of(self.roles.query_position)))
        return f"{what}_of_{re.sub(r'[^A-Za-z0-9]', '_', length)}"

    def _features(self, turn: Turn, angle: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor]:
        """Return query and key, (B, T, heads * 2 channels)."""
        count, channels = (axis_size(x) for x in (self.layout.value, self.roles.channels))
        width = 2 * count * channels
        both = self._shaped(self._beside(angle, angle), [1, width])
        length = self.size(size_of(self.roles.query_position))
        whole, inside, starts = self._blocks(length)
        blocks, tokens, rows = (self._size_of(x) for x in ("blocks", "tokens", "rows"))
        first = self.add("Mul", [starts, both], DOUBLE, shape=[blocks, width])
        shape: list[int | str] = [1, blocks, 1, width]
        parts = [self._shaped(x, [1, -1, 1, width], shape) for x in self._cos_sin(first)]
        sequences = self.shape_of((self.roles.batch,))
        ones = gs.Constant(self.name("ones"), np.ones(3, LARGE))
        sizes = self._joined([sequences, ones], 0)
        batch = written_size(size_of(self.roles.batch))
        shape = [batch, blocks, 1, width]
        parts = [self.add("Expand", [x, sizes], FLOAT, shape=shape) for x in parts]
        count_of_rows = self.add("Mul", [whole, inside], LARGE, shape=[1])
        last = gs.Constant(self.name("size"), np.asarray([width], LARGE))
        target = self._joined([sequences, count_of_rows, last], 0)
        time = written_size(size_of(self.roles.query_position))
        found: list[gs.Tensor] = []
        for tables in self._tables(turn, both):
            shape = [batch, blocks, tokens, width]
            products = [
                self.add("Mul", [x, self._cut(table, inside, 2, tokens)], FLOAT, shape=shape)
                for x, table in zip(parts, tables, strict=True)
            ]
            turned = self.add("Add", products, FLOAT, shape=shape)
            shape = [batch, rows, width]
            turned = self.add("Reshape", [turned, target], FLOAT, shape=shape)
            found.append(self._cut(turned, length, 1, time))
        query, key = found
        return query, key

    def _blocks(self, length: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
        """Return the number of blocks, the tokens of one, and T - 1 - 64 i of each, (blocks, 1)."""
        zero, one, most = (
            gs.Constant(self.name("number"), np.asarray(n, LARGE)) for n in (0, 1, BLOCK)
        )
        last, blocks = self._op("Sub", length, 1), self._size_of("blocks")
        count = self._op("Div", self._op("Add", length, BLOCK - 1), BLOCK)
        inside = self.add("Min", [length, most], LARGE, shape=[1])
        end = self.add("Squeeze", [count], LARGE, shape=[])
        numbers = self.add("Range", [zero, end, one], LARGE, shape=[blocks])
        before = self.add("Sub", [last, self._op("Mul", numbers, BLOCK)], LARGE, shape=[blocks])
        return count, inside, self._shaped(self.cast(before, DOUBLE), [-1, 1], [blocks, 1])

    def _tables(self, turn: Turn, both: gs.Tensor) -> list[list[gs.Tensor]]:
        """Return what cosine and sine of a block's angle are multiplied with, (1, 1, 64, width).

        Of the query, then of the key: with x = b j, cos (W - x) = cos W cos x + sin W sin x, and
        sin (W - x) = sin W cos x - cos W sin x.
        """
        distances = gs.Constant(self.name("distances"), np.arange(BLOCK, dtype=DOUBLE)[:, None])
        width = both.shape[1]
        angles = self.add("Mul", [distances, both], DOUBLE, shape=[BLOCK, width])
        cos, sin = self._cos_sin(angles)
        c = self.stored(turn.cosines, FLOAT)
        d = self._op("Neg", self.stored(turn.sines, FLOAT))
        one, none, minus = (
            gs.Constant(self.name("row"), np.full(c.shape, n, FLOAT)) for n in (1, 0, -1)
        )
        opposite, negative = (self._op("Neg", x) for x in (d, c))
        weights = (
            (((c, opposite), (opposite, negative)), ((d, c), (c, opposite))),
            (((one, none), (none, minus)), ((none, one), (one, none))),
        )
        shape = [1, 1, BLOCK, width]

        def weighed(of_cos: gs.Tensor, of_sin: gs.Tensor) -> gs.Tensor:
            parts = ((cos, of_cos), (sin, of_sin))
            products = [self.add("Mul", [*pair], FLOAT, shape=shape) for pair in parts]
            return self.add("Add", products, FLOAT, shape=shape)

        return [
            [
                weighed(*(self._shaped(self._beside(*pair), [1, 1, 1, width]) for pair in pairs))
                for pairs in of_one
            ]
            for of_one in weights
        ]

    def _turned_beginning(self, angle: gs.Tensor) -> gs.Tensor:
        """Return e^{i b T} h_0 of h_0 = 0, (B, heads, 2 channels, d_v), in float64 on the way."""
        roles, length = self.roles, self.size(size_of(self.roles.query_position))
        groups = (self.layout.value, roles.channels, roles.widths)
        count, channels, width = (axis_size(x) for x in groups)
        whole = self.add("Mul", [angle, self.cast(length, DOUBLE)], DOUBLE, shape=angle.shape)
        cos, sin = self._cos_sin(whole, DOUBLE)
        entries = self._joined([cos, self._op("Neg", sin), sin, cos], 1)
        matrix = self._shaped(entries, [1, count, 2, 2, channels, 1])
        batch = written_size(size_of(roles.batch))
        zero = gs.Constant(self.name("zero"), np.zeros((1, 1, 1, 1), FLOAT))
        own, pair = [count, 2 * channels, width], [count, 1, 2, channels, width]
        rest = gs.Constant(self.name("sizes"), np.asarray(own, LARGE))
        sizes = self._joined([self.shape_of((roles.batch,)), rest], 0)
        past = self.add("Expand", [zero, sizes], FLOAT, shape=[batch, *own])
        pairs = self.cast(self._shaped(past, [0, *pair], [batch, *pair]), DOUBLE)
        shape: list[int | str] = [batch, count, 2, 2, channels, width]
        product = self.add("Mul", [pairs, matrix], DOUBLE, shape=shape)
        places = gs.Constant(self.name("axes"), np.asarray([3], LARGE))
        kept = {"keepdims": 0}
        shape = [batch, count, 2, channels, width]
        turned = self.add("ReduceSum", [product, places], DOUBLE, attrs=kept, shape=shape)
        return self._shaped(self.cast(turned, FLOAT), [0, *own], [batch, *own])

    def _cos_sin(
        self, turns: gs.Tensor, dtype: np.dtype[np.generic] = FLOAT
    ) -> tuple[gs.Tensor, gs.Tensor]:
        """Return cosine and sine of turns in float64, of which whole ones are left out first."""
        rest = self._op("Sub", turns, self._op("Round", turns))
        angle = self._op("Mul", self.cast(rest, dtype), 2 * math.pi)
        return self._op("Cos", angle), self._op("Sin", angle)

    def _beside(self, first: gs.Tensor, second: gs.Tensor) -> gs.Variable:
        """Return (heads, 2 channels)."""
        return self._joined([first, second], 1)

    def _joined(self, tensors: list[gs.Tensor], axis: int) -> gs.Variable:
        shape = list(tensors[0].shape)
        shape[axis] = sum(t.shape[axis] for t in tensors)
        dtype = np.dtype(tensors[0].dtype)
        return self.add("Concat", tensors, dtype, attrs={"axis": axis}, shape=shape)

    def _shaped(
        self, x: gs.Tensor, sizes: list[int], shape: list[int | str] | None = None
    ) -> gs.Variable:
        target = gs.Constant(self.name("shape"), np.asarray(sizes, LARGE))
        return self.add("Reshape", [x, target], np.dtype(x.dtype), shape=shape or sizes)

    def _cut(self, x: gs.Tensor, end: gs.Tensor, axis: int, size: int | str) -> gs.Variable:
        """Return what comes before a place along an axis."""
        shape = list(x.shape)
        shape[axis] = size
        start, along = (gs.Constant(self.name("place"), np.asarray([n], LARGE)) for n in (0, axis))
        return self.add("Slice", [x, start, end, along], np.dtype(x.dtype), shape=shape)

    def _op(self, op: str, x: gs.Tensor, y: gs.Tensor | float | None = None) -> gs.Variable:
        """Write an elementwise operator on a tensor and one of its shape or a number."""
        if y is None:
            return self.add(op, [x], np.dtype(x.dtype), shape=x.shape)
        if not isinstance(y, gs.Tensor):
            y = gs.Constant(self.name("number"), np.asarray(y, x.dtype))
        return self.add(op, [x, y], np.dtype(x.dtype), shape=x.shape)
