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
        whole = self.add("Shape", [added[0]], LARGE, shape=[3])
        size, angle = self._polar(factor)
        decay = self._cast(self.add("Log", [size], DOUBLE, shape=size.shape), FLOAT)
        decay = self.add("Expand", [decay, whole], FLOAT, shape=self._tokens())
        parts = self._op("Mul", angle, TURN / (2 * math.pi))
        parts = self._cast(self.add("Round", [parts], DOUBLE, shape=parts.shape), LARGE)
        parts = self._of_all_tokens(parts, whole)
        time = gs.Constant(self.name("axis"), np.asarray(1, LARGE))
        after = {"exclusive": 1, "reverse": 1}
        later = self.add("CumSum", [parts, time], LARGE, attrs=after, shape=parts.shape)
        cos, sin = self._cos_sin(later)
        one = gs.Constant(self.name("one"), np.ones((1, 1, 1), FLOAT))
        ones = self.add("Expand", [one, whole], FLOAT, shape=self._tokens())
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
        return self._turned(self._apart(output), cos, self._op("Neg", sin))

    def _polar(self, factor: Pair) -> tuple[gs.Tensor, gs.Tensor]:
        """Return r and w in float64, from which what is multiplied with in float32 is exact.

        There is no arc cosine in float64: that of float32 is off by 3e-4 near 0, and one step of
        Newton's method leaves the cube of that.
        """
        a, b = (self._cast(x, DOUBLE) for x in factor)
        size = self._op("Sqrt", self._op("Add", self._op("Mul", a, a), self._op("Mul", b, b)))
        over = self._op("Max", size, SMALLEST)
        cos = self._cast(self._op("Div", a, over), FLOAT)
        cos = self._op("Min", self._op("Max", cos, -1.0), 1.0)
        guess = self._cast(self._op("Acos", cos), DOUBLE)
        below = self.add("Less", [b, self._number(b, 0.0)], np.dtype(bool), shape=b.shape)
        negative = self._op("Neg", guess)
        guess = self.add("Where", [below, negative, guess], DOUBLE, shape=_wider(a, b))
        apart = self._op("Mul", b, self._op("Cos", guess))
        apart = self._op("Sub", apart, self._op("Mul", a, self._op("Sin", guess)))
        return size, self._op("Add", guess, self._op("Div", apart, over))

    def _of_all_tokens(self, x: gs.Tensor, whole: gs.Tensor) -> gs.Tensor:
        """Return (B, T, N) of what may be the same for all tokens; a batch of 1 stays."""
        if known_shape(x)[1] == self.length:
            return x
        number = gs.Constant(self.name("number"), np.asarray([1], LARGE))
        bounds = [gs.Constant(self.name("place"), np.asarray([n], LARGE)) for n in (1, 2)]
        length = self.add("Slice", [whole, *bounds], LARGE, shape=[1])
        sizes = self.add("Concat", [number, length, number], LARGE, attrs={"axis": 0}, shape=[3])
        return self.add(
            "Expand", [x, sizes], LARGE, shape=[known_shape(x)[0], self.length, self.count]
        )

    def _cos_sin(self, parts: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor]:
        """Return cosine and sine of parts of a turn, which are brought to half a turn at most."""
        half = self._op("Add", parts, TURN // 2)
        inside = self._op("Sub", self._op("Mod", half, TURN), TURN // 2)
        angle = self._op("Mul", self._cast(inside, FLOAT), 2 * math.pi / TURN)
        return self._op("Cos", angle), self._op("Sin", angle)

    def _turned(self, x: Pair, cos: gs.Tensor, sin: gs.Tensor) -> Pair:
        """Return e^{iW} x."""
        shape = self._tokens()

        def product(a: gs.Tensor, b: gs.Tensor) -> gs.Tensor:
            return self.add("Mul", [a, b], FLOAT, shape=shape)

        real, imaginary = x
        return (
            self._op("Sub", product(real, cos), product(imaginary, sin)),
            self._op("Add", product(real, sin), product(imaginary, cos)),
        )

    def _past(self, parts: gs.Tensor, whole: gs.Tensor) -> gs.Tensor:
        """Return e^{iW_0} h_0 of h_0 = 0, (B, N, 1, 2): rows times matrices."""
        time = gs.Constant(self.name("axes"), np.asarray([1], LARGE))
        batch = known_shape(parts)[0]
        kept = {"keepdims": 0}
        total = self.add("ReduceSum", [parts, time], LARGE, attrs=kept, shape=[batch, self.count])
        cos, sin = self._cos_sin(total)
        last = gs.Constant(self.name("axes"), np.asarray([2], LARGE))
        entries = (cos, sin, self._op("Neg", sin), cos)
        shape = [batch, self.count, 1]
        columns = [self.add("Unsqueeze", [x, last], FLOAT, shape=shape) for x in entries]
        shape = [batch, self.count, 4]
        matrix = self.add("Concat", columns, FLOAT, attrs={"axis": 2}, shape=shape)
        square = gs.Constant(self.name("shape"), np.asarray([0, 0, 2, 2], LARGE))
        shape = [batch, self.count, 2, 2]
        matrix = self.add("Reshape", [matrix, square], FLOAT, shape=shape)
        ends = [gs.Constant(self.name("place"), np.asarray([n], LARGE)) for n in (0, 1)]
        sequences = self.add("Slice", [whole, *ends], LARGE, shape=[1])
        rest = gs.Constant(self.name("sizes"), np.asarray([self.count, 1, 2], LARGE))
        sizes = self.add("Concat", [sequences, rest], LARGE, attrs={"axis": 0}, shape=[4])
        zero = gs.Constant(self.name("zero"), np.zeros((1, 1, 1, 1), FLOAT))
        shape = [self.batch, self.count, 1, 2]
        past = self.add("Expand", [zero, sizes], FLOAT, shape=shape)
        return self.add("MatMul", [past, matrix], FLOAT, shape=shape)

    def _packed(self, x: Pair) -> gs.Tensor:
        """Return (B, T, 2 N), the parts of a channel side by side."""
        last = gs.Constant(self.name("axes"), np.asarray([3], LARGE))
        shape = [*self._tokens(), 1]
        parts = [self.add("Unsqueeze", [part, last], FLOAT, shape=shape) for part in x]
        shape = [*self._tokens(), 2]
        both = self.add("Concat", parts, FLOAT, attrs={"axis": 3}, shape=shape)
        sizes = gs.Constant(self.name("shape"), np.asarray([0, 0, 2 * self.count], LARGE))
        shape = [self.batch, self.length, 2 * self.count]
        return self.add("Reshape", [both, sizes], FLOAT, shape=shape)

    def _apart(self, x: gs.Tensor) -> Pair:
        """Return both parts of (B, T, 2 N)."""
        sizes = gs.Constant(self.name("shape"), np.asarray([0, 0, self.count, 2], LARGE))
        x = self.add("Reshape", [x, sizes], FLOAT, shape=[*self._tokens(), 2])
        places = [gs.Constant(self.name("place"), np.asarray(n, LARGE)) for n in (0, 1)]
        along = {"axis": 3}
        real, imaginary = (
            self.add("Gather", [x, place], FLOAT, attrs=along, shape=self._tokens())
            for place in places
        )
        return real, imaginary

    def _tokens(self) -> list[int | str]:
        return [self.batch, self.length, self.count]

    def _cast(self, x: gs.Tensor, dtype: np.dtype[np.generic]) -> gs.Tensor:
        return self.cast(x, dtype)

    def _op(self, op: str, x: gs.Tensor, y: gs.Tensor | float | None = None) -> gs.Tensor:
        """Write an elementwise operator; either input may be the same for all tokens."""
        if y is None:
            return self.add(op, [x], np.dtype(x.dtype), shape=x.shape)
        if not isinstance(y, gs.Tensor):
            return self.add(op, [x, self._number(x, y)], np.dtype(x.dtype), shape=x.shape)
        return self.add(op, [x, y], np.dtype(x.dtype), shape=_wider(x, y))

    def _number(self, like: gs.Tensor, value: float) -> gs.Constant:
        return gs.Constant(self.name("number"), np.asarray(value, like.dtype))


def _wider(x: gs.Tensor, y: gs.Tensor) -> list[int | str]:
    """Return the shape of two tensors together; either may have a size of 1 anywhere."""
    return [m if n == 1 else n for n, m in zip(known_shape(x), known_shape(y), strict=True)]
