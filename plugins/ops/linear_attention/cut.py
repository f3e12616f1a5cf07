"""Operands of the chunked lowerings: in float32, cut into chunks of tokens, joined again.

The normaliser is a column of the state: values have a last column of ones, and so the state has
one that is z and an output one that is its denominator. It is zero, as the values are, where a
token is masked or padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body, ceil_div
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec


class Operands(NamedTuple):
    """The op's inputs in float32, masked; "" for an absent gate.

    Attributes:
        query, key, decay, beta: packed, as they are.
        value: (B, T, H_kv * (d_v + 1)), with a column of ones.
        past: (B, H_kv, d_k, d_v + 1), zeros where none is given.
    """

    query: str
    key: str
    value: str
    decay: str
    beta: str
    past: str


def operands(
    b: Body, spec: LinearAttentionSpec, sizes: AttentionSizes, inputs: Sequence[str]
) -> Operands:
    """From the op's eight inputs, "" for an absent one."""
    query, key, value, past_state, past_normalizer, decay, beta, key_mask = inputs
    batch, heads = b.Shape(query, start=0, end=1), spec.kv_num_heads
    q, k, v = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value))
    decay, beta = (x and b.Cast(x, to=TensorProto.FLOAT) for x in (decay, beta))
    v = b.Reshape(v, b.const([0, 0, heads, sizes.d_v]))
    ones = b.Expand(b.const(1.0), dims(b, batch, b.Shape(query, start=1, end=2), heads, 1))
    v = b.Reshape(b.Concat(v, ones, axis=3), b.const([0, 0, heads * (sizes.d_v + 1)]))
    if key_mask:
        keep = b.Unsqueeze(key_mask, b.const([2]))
        k, v, decay, beta = (x and b.Where(keep, x, b.const(0.0)) for x in (k, v, decay, beta))

    S = past_state or b.Expand(b.const(0.0), dims(b, batch, heads, sizes.d_k, sizes.d_v))
    z = past_normalizer or b.Expand(b.const(0.0), dims(b, batch, heads, sizes.d_k))
    states = [b.Cast(S, to=TensorProto.FLOAT), b.Unsqueeze(z, b.const([3]))]
    return Operands(q, k, v, decay, beta, b.Concat(*states, axis=3))


def value_columns(b: Body, extended: str, sizes: AttentionSizes, axis: int = -1) -> tuple[str, str]:
    """The columns of the values and the one behind them that sums weights."""
    axes, width = b.const([axis]), b.const([sizes.d_v])
    value = b.Slice(extended, b.const([0]), width, axes)
    return value, b.Slice(extended, width, b.const([sizes.d_v + 1]), axes)


def dims(b: Body, *sizes: int | str) -> str:
    """A shape tensor of fixed sizes and one-element tensors."""
    parts = [b.const([s]) if isinstance(s, int) else s for s in sizes]
    return str(b.Concat(*parts, axis=0))


def transposed(b: Body, chunks: str) -> str:
    """(B, H_kv, G, C, d) with its last two axes exchanged."""
    return str(b.Transpose(chunks, perm=[0, 1, 2, 4, 3]))


class Cutter:
    """Cuts (B, T, heads*d) into N chunks of C tokens and joins them again.

    N = ceil(T / largest). C = ceil(T / N) where ``balanced``, so that at most N - 1 tokens of
    padding are added; otherwise C = largest.
    """

    def __init__(
        self,
        b: Body,
        spec: LinearAttentionSpec,
        sizes: AttentionSizes,
        query: str,
        largest: int,
        balanced: bool = True,
    ) -> None:
        self.b, self.spec, self.query = b, spec, query
        self.width = spec.output_heads * sizes.d_v
        self.batch = b.Shape(query, start=0, end=1)
        self.length = length = b.Shape(query, start=1, end=2)
        one = b.const([1])
        self.size = b.const([largest])
        self.count = b.Max(ceil_div(b, length, self.size), one)
        if balanced:
            # At least 1: for T = 0, ONNX Runtime leaves products over no tokens uninitialised.
            self.size = b.Max(ceil_div(b, length, self.count), one)
        padding = b.Sub(b.Mul(self.count, self.size), length)
        self.pads = b.Concat(b.const([0, 0, 0, 0]), padding, b.const([0]), axis=0)

    def split(
        self, packed: str, heads: int, queries: bool = False, tokens_last: bool = False
    ) -> str:
        """Chunks (N, B, H_kv, G, C, d), or (N, B, H_kv, G, d, C) with ``tokens_last``.

        G counts the query heads that share one key/value head; it is 1 for keys and values.
        """
        b, served = self.b, self.spec.output_heads if queries else self.spec.kv_num_heads
        packed = b.Pad(packed, self.pads)
        width = b.Div(b.Shape(packed, start=2, end=3), b.const([heads]))
        shape = dims(b, self.batch, self.count, self.size, heads, width)
        x = b.Reshape(packed, shape, allowzero=1)
        if heads != served:
            x = b.Gather(x, b.const(np.repeat(np.arange(heads), served // heads)), axis=3)
        kv = self.spec.kv_num_heads
        grouped = dims(b, self.batch, self.count, self.size, kv, served // kv, width)
        x = b.Reshape(x, grouped, allowzero=1)
        return str(b.Transpose(x, perm=[1, 0, 3, 4, 5, 2] if tokens_last else [1, 0, 3, 4, 2, 5]))

    def join(self, chunks: str, tokens_last: bool = False) -> str:
        """The output, (B, T, H * d_v) in the type of the query, from its chunks."""
        b = self.b
        x = b.Transpose(chunks, perm=[1, 0, 5, 2, 3, 4] if tokens_last else [1, 0, 4, 2, 3, 5])
        padded = b.Mul(self.count, self.size)
        x = b.Reshape(x, dims(b, self.batch, padded, self.width), allowzero=1)
        return str(b.CastLike(b.Slice(x, b.const([0]), self.length, b.const([1])), self.query))
