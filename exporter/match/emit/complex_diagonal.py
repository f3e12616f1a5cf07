"""A state of pairs that every token turns and scales, as a recurrence whose decay is real.

    h_t = r_t e^{i w_t} h_{t-1} + b_t,    W_t = w_{t+1} + ... + w_T,    W_T = 0
    g_t = e^{i W_t} h_t    is    g_t = r_t g_{t-1} + e^{i W_t} b_t,    g_0 = e^{i W_0} h_0

because W_t + w_t = W_{t-1}. As W_T is 0, the state that is carried on is h itself: nothing of it
grows with the number of tokens. Angles are counted in 2^-40 of a turn, as integers, whose sums are
exact: an angle is off by 3e-12 for each token, and by the 2e-7 of a cosine in float32 once.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import Nodes
from linexport.plugins.ops import linear_attention
from linexport.plugins.ops.linear_attention import INPUTS
from linexport.plugins.ops.op import DOMAIN

FLOAT, DOUBLE, LARGE = (np.dtype(kind) for kind in (np.float32, np.float64, np.int64))
TURN = 2**40
"""Parts of a turn."""

SMALLEST = 1e-300
"""A size that is divided by where there is none."""

Pair = tuple[gs.Tensor, gs.Tensor]


class Turns(Nodes):
    """Writes the recurrence.

    Args:
        prefix: of all names.
        batch, length: sizes of the tokens.
        count: channels, each of a pair.
    """

    def __init__(self, prefix: str, batch: int | str, length: int | str, count: int) -> None:
        super().__init__(prefix, ())
        self.batch, self.length, self.count = batch, length, count
        self.fused: gs.Node

    def write(self, factor: Pair, added: Pair) -> Pair:
        """Return real and imaginary part of h, (B, T, N).

        Args:
            factor: real and imaginary part of r e^{iw}; batch and length may be 1.
            added: of b, (B, T, N).
        """
        whole = self.op.Shape(added[0])
        size, angle = self._polar(factor)
        decay = self.op.Expand(self.cast(self.op.Log(size), FLOAT), whole, shape=self._tokens())
        turns = self.op.Round(self.op.Mul(angle, TURN / (2 * math.pi)))
        parts = self._of_all_tokens(self.cast(turns, LARGE), whole)
        later = self.op.CumSum(parts, np.asarray(1, LARGE), exclusive=1, reverse=1)
        cos, sin = self._cos_sin(later)
        ones = self.op.Expand(np.ones((1, 1, 1), FLOAT), whole, shape=self._tokens())
        value = self._packed(self._turned(added, cos, sin))
        inputs: list[gs.Tensor] = [gs.Variable.empty()] * len(INPUTS)
        given = {"query": ones, "key": ones, "value": value, "decay": decay}
        given["past_state"] = self._past(parts, whole)
        for name, tensor in given.items():
            inputs[INPUTS.index(name)] = tensor
        output = gs.Variable(self.name("output"), FLOAT, [*self._tokens()[:2], 2 * self.count])
        self.fused = gs.Node(
            linear_attention.OP.name,
            f"{output.name}/LinearAttention",
            {
                "q_num_heads": self.count,
                "kv_num_heads": self.count,
                "update_rule": "gated",
                "causal": 1,
                "normalize": 0,
                "scale": 1.0,
                "eps": 0.0,
            },
            inputs[: INPUTS.index("decay") + 1],
            [output],
            domain=DOMAIN,
        )
        self.nodes.append(self.fused)
        # h_t = e^{-i W_t} g_t, and the sine of -W has the other sign.
        return self._turned(self._split(output), cos, self.op.Neg(sin))

    def _polar(self, factor: Pair) -> tuple[gs.Tensor, gs.Tensor]:
        """Return r and w in float64, so that factors made of them are exact in float32.

        ONNX Runtime has no Acos in float64: that of float32 is off by 3e-4 near 0, and one step of
        Newton's method leaves the cube of that.
        """
        a, b = (self.cast(x, DOUBLE) for x in factor)
        size = self.op.Sqrt(self.op.Add(self.op.Mul(a, a), self.op.Mul(b, b)))
        over = self.op.Max(size, SMALLEST)
        cos = self.cast(self.op.Div(a, over), FLOAT)
        cos = self.op.Min(self.op.Max(cos, -1.0), 1.0)
        guess = self.cast(self.op.Acos(cos), DOUBLE)
        # Acos is between 0 and pi; with a negative sine the angle is the opposite one.
        guess = self.op.Where(self.op.Less(b, 0.0), self.op.Neg(guess), guess)
        # One step for f(w) = b cos(w) - a sin(w) = r sin(angle - w), whose derivative is -r there.
        error = self.op.Mul(b, self.op.Cos(guess))
        error = self.op.Sub(error, self.op.Mul(a, self.op.Sin(guess)))
        return size, self.op.Add(guess, self.op.Div(error, over))

    def _of_all_tokens(self, x: gs.Tensor, whole: gs.Tensor) -> gs.Tensor:
        """Expand a tensor along tokens to (B, T, N); a batch of 1 is kept."""
        if known_shape(x)[1] == self.length:
            return x
        sizes = self.op.Concat([1], self.op.Slice(whole, [1], [2]), [1], axis=0)
        return self.op.Expand(x, sizes, shape=[known_shape(x)[0], self.length, self.count])

    def _cos_sin(self, parts: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor]:
        """Return cosine and sine of parts of a turn, which are brought to half a turn at most."""
        # Whole turns change neither; a small angle keeps its digits in float32.
        half = self.op.Add(parts, TURN // 2)
        inside = self.op.Sub(self.op.Mod(half, TURN), TURN // 2)
        angle = self.op.Mul(self.cast(inside, FLOAT), 2 * math.pi / TURN)
        return self.op.Cos(angle), self.op.Sin(angle)

    def _turned(self, x: Pair, cos: gs.Tensor, sin: gs.Tensor) -> Pair:
        """Return e^{iW} x."""
        shape = self._tokens()

        def product(a: gs.Tensor, b: gs.Tensor) -> gs.Tensor:
            return self.op.Mul(a, b, shape=shape)

        # (cos + i sin) (a + i b) = (a cos - b sin) + i (a sin + b cos)
        real, imaginary = x
        return (
            self.op.Sub(product(real, cos), product(imaginary, sin)),
            self.op.Add(product(real, sin), product(imaginary, cos)),
        )

    def _past(self, parts: gs.Tensor, whole: gs.Tensor) -> gs.Tensor:
        """Return e^{iW_0} h_0 of h_0 = 0, (B, N, 1, 2): rows times matrices."""
        cos, sin = self._cos_sin(self.op.ReduceSum(parts, [1], keepdims=0))
        # The row (a, b) times ((cos, sin), (-sin, cos)) is the pair turned.
        entries = (cos, sin, self.op.Neg(sin), cos)
        rows = self.op.Concat(*(self.op.Unsqueeze(x, [2]) for x in entries), axis=2)
        matrix = self.op.Reshape(rows, [0, 0, 2, 2])
        sequences = self.op.Slice(whole, [0], [1])
        sizes = self.op.Concat(sequences, [self.count, 1, 2], axis=0)
        shape = [self.batch, self.count, 1, 2]
        past = self.op.Expand(np.zeros((1, 1, 1, 1), FLOAT), sizes, shape=shape)
        return self.op.MatMul(past, matrix, shape=shape)

    def _packed(self, x: Pair) -> gs.Tensor:
        """Return (B, T, 2 N), the parts of a channel side by side."""
        both = self.op.Concat(*(self.op.Unsqueeze(part, [3]) for part in x), axis=3)
        shape = [self.batch, self.length, 2 * self.count]
        return self.op.Reshape(both, [0, 0, 2 * self.count], shape=shape)

    def _split(self, x: gs.Tensor) -> Pair:
        """Return both parts of (B, T, 2 N)."""
        pairs = self.op.Reshape(x, [0, 0, self.count, 2])
        real, imaginary = (self.op.Gather(pairs, np.asarray(n, LARGE), axis=3) for n in (0, 1))
        return real, imaginary

    def _tokens(self) -> list[int | str]:
        return [self.batch, self.length, self.count]
