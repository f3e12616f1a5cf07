"""One call of a LinearAttention kernel, its denominator, and the packing of heads it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops import linear_attention
from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention import (
    LinearAttentionSpec,
)

KEY_MULTIPLE, VALUE_MULTIPLE = 16, 32
"""ONNX Runtime's CPU kernel is fast for key and value widths that are multiples of these."""


@dataclass(frozen=True)
class Dialect:
    """Where the kernel's operator lives.

    Attributes:
        domain: of LinearAttention and CausalConvWithState.
        shares_keys: one query or key head may serve several value heads.
        mixes_types: half-precision activations go with a state in float32. ONNX Runtime's kernel
            computes so, but its type inference refuses it.
        splits_heads: the operator is GatedDeltaNet.
        ends: cu_seqlens of sequences side by side, which only that operator takes; "" for none.
    """

    domain: str
    shares_keys: bool
    mixes_types: bool
    splits_heads: bool = False
    ends: str = ""


ONNX_RUNTIME = Dialect(MICROSOFT, shares_keys=True, mixes_types=False)
GATED_DELTA_NET = replace(ONNX_RUNTIME, splits_heads=True)


@dataclass(frozen=True)
class NativeKernel:
    """The kernel on one query, key and decay, packed, with heads of width ``d_k``."""

    b: Body
    dialect: Dialect
    spec: LinearAttentionSpec
    key_heads: int
    d_k: int
    query: str
    key: str
    decay: str

    def call(self, value: str, past: str, beta: str) -> tuple[str, str]:
        """Output, in float32 unless the dialect mixes types, and state, in float32."""
        b, inputs = self.b, [self.query, self.key, value, past, self.decay, beta]
        while not inputs[-1]:
            inputs.pop()
        if not self.dialect.mixes_types:
            inputs = [x and b.Cast(x, to=TensorProto.FLOAT) for x in inputs]
        output, state = b.node(
            linear_attention.OP.name,
            *inputs,
            outputs=2,
            domain=self.dialect.domain,
            q_num_heads=self.spec.q_num_heads,
            kv_num_heads=self.spec.kv_num_heads,
            update_rule=self.spec.update_rule,
            scale=float(self.spec.scale),
        )
        if self.dialect.mixes_types:
            # The operator keeps its state in the activation type where it is not given one.
            state = b.Cast(state, to=TensorProto.FLOAT)
        return output, state

    def denominator(self, past: str) -> tuple[str, str]:
        """scale q_t . z_t as (B, T, H, 1) in float32, and the last z as (B, H_kv, d_k)."""
        return self._by_kernel(past) if self.decay else self._by_cumsum(past)

    def _by_cumsum(self, past: str) -> tuple[str, str]:
        b, spec, d_k, heads = self.b, self.spec, self.d_k, self.spec.kv_num_heads
        query, key = (b.Cast(x, to=TensorProto.FLOAT) for x in (self.query, self.key))
        if self.key_heads != heads:
            key = repeat_heads(b, key, self.key_heads, heads, d_k)
        if spec.q_num_heads < heads:
            query = repeat_heads(b, query, spec.q_num_heads, heads, d_k)
        sums = b.CumSum(key, b.const(1))
        start = b.Reshape(past, b.const([0, 1, heads * d_k])) if past else self._zero_row(key)
        if past:
            sums = b.Add(sums, start)
        # The last sum, or the one before the first token where T = 0. Summing the keys again, over
        # tokens, would cost as much as all of the above.
        last, end = b.const([-1]), b.const([np.iinfo(np.int64).max])
        total = b.Concat(start, b.Slice(sums, last, end, b.const([1])), axis=1)
        total = b.Slice(total, last, end, b.const([1]))
        group = spec.output_heads // heads
        if group == 1:
            products = split_heads(b, b.Mul(query, sums), heads, d_k)
        else:
            grouped = b.Reshape(query, b.const([0, 0, heads, group, d_k]))
            shared = b.Reshape(sums, b.const([0, 0, heads, 1, d_k]))
            products = b.Reshape(b.Mul(grouped, shared), b.const([0, 0, heads * group, d_k]))
        # Not ReduceSum, whose output has the wrong shape in ONNX Runtime when T = 0.
        denominator = b.MatMul(products, b.const(np.full((d_k, 1), spec.scale)))
        return denominator, b.Reshape(total, b.const([0, heads, d_k]))

    def _zero_row(self, key: str) -> str:
        """(B, 1, width of key) of zeros."""
        b = self.b
        width = b.const([self.spec.kv_num_heads * self.d_k])
        shape = b.Concat(b.Shape(key, start=0, end=1), b.const([1]), width, axis=0)
        return str(b.Expand(b.const(0.0), shape))

    def _by_kernel(self, past: str) -> tuple[str, str]:
        """One value channel of ones, padded to the width the kernel is fast at."""
        b, heads, width = self.b, self.spec.kv_num_heads, VALUE_MULTIPLE
        unit = np.zeros((heads, width), np.float32)
        unit[:, 0] = 1
        row = b.CastLike(b.const(unit.reshape(1, 1, -1)), self.query)
        tokens = b.Shape(self.query, start=0, end=2)
        ones = b.Expand(row, b.Concat(tokens, b.const([1]), axis=0))
        if past:
            pads = b.const([0, 0, 0, 0, 0, 0, 0, width - 1])
            past = b.Pad(b.Unsqueeze(past, b.const([3])), pads)
        output, state = self.call(ones, past, "")
        split = split_heads(b, output, self.spec.output_heads, width)
        first, second, axis = b.const([0]), b.const([1]), b.const([3])
        return (
            b.Slice(b.Cast(split, to=TensorProto.FLOAT), first, second, axis),
            b.Squeeze(b.Slice(state, first, second, axis), axis),
        )


def split_heads(b: Body, packed: str, heads: int, width: int) -> str:
    """(B, T, H*d) as (B, T, H, d); also for T = 0, so the width is given."""
    return str(b.Reshape(packed, b.const([0, 0, heads, width])))


def pack_heads(b: Body, split: str, width: int) -> str:
    """(B, T, H, d) as (B, T, width), of width H*d."""
    return str(b.Reshape(split, b.const([0, 0, width])))


def pad_heads(b: Body, packed: str, heads: int, width: int, padded: int) -> str:
    """(B, T, H*width) as (B, T, H*padded), in float32: every head ends in zeros."""
    pads = b.const([0, 0, 0, 0, 0, 0, 0, padded - width])
    split = split_heads(b, b.Cast(packed, to=TensorProto.FLOAT), heads, width)
    return pack_heads(b, b.Pad(split, pads), heads * padded)


def cut_heads(b: Body, packed: str, heads: int, width: int, padded: int) -> str:
    """(B, T, H*padded) as (B, T, H*width), without what pads every head."""
    if width == padded:
        return packed
    split = split_heads(b, packed, heads, padded)
    cut = b.Slice(split, b.const([0]), b.const([width]), b.const([3]))
    return pack_heads(b, cut, heads * width)


def repeat_heads(b: Body, packed: str, heads: int, served: int, width: int) -> str:
    """(B, T, heads*width) as (B, T, served*width): each head stands for several in turn."""
    index = b.const(np.repeat(np.arange(heads), served // heads))
    return pack_heads(
        b, b.Gather(split_heads(b, packed, heads, width), index, axis=2), served * width
    )
