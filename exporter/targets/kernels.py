"""linexport ops lowered to a LinearAttention kernel: ONNX Runtime's own, or the opset 27 operator.

Both have the four causal update rules, without normaliser and mask. The mask is applied to key and
decay in front; the denominator is a running sum of keys:

    den_t = scale q_t . (z_0 + sum_{s <= t} k_s)                       linear, normalised
    den   = the same kernel on values of one                           gated, normalised
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops import causal_conv, linear_attention
from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention import (
    INPUTS,
    AbsorbedMap,
    LinearAttentionSpec,
    absorbed_map,
    view,
)
from linexport.plugins.ops.linear_attention.spec import AttentionSizes
from linexport.plugins.ops.op import Node
from linexport.targets.token_blocks import blocked

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
    """

    domain: str
    shares_keys: bool
    mixes_types: bool


ONNX_RUNTIME = Dialect(MICROSOFT, shares_keys=True, mixes_types=False)
ONNX_27 = Dialect("", shares_keys=False, mixes_types=True)


BY_KAPPA = "products of features by their scalar kernel"


def by_kappa(node: Node) -> bool:
    """The chunk form's kernel of a product is better than the native kernel on features.

    Where features are more than components, they would be computed for every token. And only in
    the chunk form are numerator and denominator made of the same products, so that a ratio of two
    small sums keeps its digits.
    """
    phi, (spec, _) = absorbed_map(node), view(node)
    if phi is None or phi.formulas.kappa is None:
        return False
    return spec.normalize or phi.features > phi.width


def native(node: Node, dialect: Dialect = ONNX_RUNTIME) -> tuple[Body, list[str]]:
    """The kernel on the widths as they are."""
    b = Body()
    return b, _native(b, _KernelCall.of(node), node.inputs[: len(INPUTS)], dialect)


def native_bounded(node: Node) -> tuple[Body, list[str]]:
    """``native_blocked`` where anything surrounds the kernel, else ``native``."""
    call = _KernelCall.of(node)
    surrounded = call.phi is not None or call.spec.normalize or "key_mask" in node.shapes
    return native_blocked(node) if surrounded else native(node)


def native_blocked(node: Node) -> tuple[Body, list[str]]:
    """ONNX Runtime's kernel and what surrounds it, a block of tokens at a time."""
    return _blocked(_KernelCall.of(node), node)


def native_padded(node: Node) -> tuple[Body, list[str]]:
    """``native_blocked`` on heads padded with zeros to the widths the kernel is fast at.

    A zero key channel stays zero in the state, and a zero value channel is cut off again.
    """
    call = _KernelCall.of(node)
    d_k = -(-call.sizes.d_k // KEY_MULTIPLE) * KEY_MULTIPLE
    d_v = -(-call.sizes.d_v // VALUE_MULTIPLE) * VALUE_MULTIPLE
    return _blocked(replace(call, padded=(d_k, d_v)), node)


@dataclass(frozen=True)
class _KernelCall:
    """A node, and the widths of heads that the kernel sees."""

    spec: LinearAttentionSpec
    sizes: AttentionSizes
    phi: AbsorbedMap | None
    padded: tuple[int, int]

    @classmethod
    def of(cls, node: Node) -> _KernelCall:
        spec, sizes = view(node)
        return cls(spec, sizes, absorbed_map(node), (sizes.d_k, sizes.d_v))


def _blocked(call: _KernelCall, node: Node) -> tuple[Body, list[str]]:
    return blocked(
        node.inputs[: len(INPUTS)],
        call.spec,
        call.sizes,
        lambda b, inputs: _native(b, call, inputs, ONNX_RUNTIME),
    )


def _native(b: Body, call: _KernelCall, inputs: Sequence[str], dialect: Dialect) -> list[str]:
    """Output, state and normalizer."""
    spec, sizes, (d_k, d_v) = call.spec, call.sizes, call.padded
    _, _, value, past_state, past_normalizer, _, beta, _ = inputs
    query, key, decay = _mapped(b, call, inputs)
    heads = spec.kv_num_heads
    if not dialect.shares_keys:
        if sizes.key_heads != heads:
            key = _repeat(b, key, sizes.key_heads, heads, sizes.d_k)
        if spec.q_num_heads < heads:
            query = _repeat(b, query, spec.q_num_heads, heads, sizes.d_k)
        spec = replace(spec, q_num_heads=spec.output_heads)
        sizes = replace(sizes, key_heads=heads)
    if d_k != sizes.d_k:
        query = _pad_heads(b, query, spec.q_num_heads, sizes.d_k, d_k)
        key = _pad_heads(b, key, sizes.key_heads, sizes.d_k, d_k)
        if sizes.decay_per_channel:
            decay = _pad_heads(b, decay, heads, sizes.d_k, d_k)
    if d_v != sizes.d_v:
        value = _pad_heads(b, value, heads, sizes.d_v, d_v)
    if past_state and (d_k, d_v) != (sizes.d_k, sizes.d_v):
        pads = [0, 0, 0, 0, 0, 0, d_k - sizes.d_k, d_v - sizes.d_v]
        past_state = b.Pad(past_state, b.const(pads))
    if past_normalizer and d_k != sizes.d_k:
        past_normalizer = b.Pad(past_normalizer, b.const([0, 0, 0, 0, 0, d_k - sizes.d_k]))

    kernel = _Kernel(b, dialect, spec, sizes.key_heads, d_k, query, key, decay)
    output, state = kernel.call(value, past_state, beta)
    if (d_k, d_v) != (sizes.d_k, sizes.d_v):
        state = b.Slice(state, b.const([0, 0]), b.const([sizes.d_k, sizes.d_v]), b.const([2, 3]))
    if not spec.normalize:
        output = b.CastLike(output, query)
        normalizer = b.const(np.zeros((1, heads, sizes.d_k), np.float32))
        return [_cut_heads(b, output, spec.output_heads, sizes.d_v, d_v), state, normalizer]

    denominator, normalizer = kernel.denominator(past_normalizer)
    # Without an axis of one value, along which ONNX Runtime would add value by value.
    packed = b.Add(_pack(b, denominator, spec.output_heads), b.const(spec.eps))
    denominator = _split(b, packed, spec.output_heads, 1)
    split = _split(b, output, spec.output_heads, d_v)
    ratio = b.Div(b.Cast(split, to=TensorProto.FLOAT), denominator)
    output = _pack(b, b.CastLike(ratio, query), spec.output_heads * d_v)
    if d_k != sizes.d_k:
        normalizer = b.Slice(normalizer, b.const([0]), b.const([sizes.d_k]), b.const([2]))
    return [_cut_heads(b, output, spec.output_heads, sizes.d_v, d_v), state, normalizer]


def _mapped(b: Body, call: _KernelCall, inputs: Sequence[str]) -> tuple[str, str, str]:
    """Query and key behind the map, key and decay of what counts."""
    query, key, *_, decay, _, key_mask = inputs
    if call.phi is not None:
        query = call.phi.apply_packed(b, "query", query, call.spec.q_num_heads)
        key = call.phi.apply_packed(b, "key", key, call.sizes.key_heads)
    if key_mask:
        keep = b.Unsqueeze(key_mask, b.const([2]))
        key = b.Where(keep, key, b.CastLike(b.const(0.0), key))
        decay = decay and b.Where(keep, decay, b.CastLike(b.const(0.0), decay))
    return query, key, decay


def is_running_sum(node: Node) -> bool:
    """One value channel and no decay: the state of a head is a vector."""
    spec, sizes = view(node)
    return spec.update_rule == "linear" and not spec.normalize and sizes.d_v == 1


def running_sum(node: Node) -> tuple[Body, list[str]]:
    """o_t = s q_t . (S_0 + sum_{s <= t} k_s v_s), a block of tokens at a time.

    That is what a normaliser is, and users who do not divide by it at once have it as a value.
    """
    call = _KernelCall.of(node)
    return blocked(
        node.inputs[: len(INPUTS)],
        call.spec,
        call.sizes,
        lambda b, inputs: _running_sum(b, call, inputs),
    )


def _running_sum(b: Body, call: _KernelCall, inputs: Sequence[str]) -> list[str]:
    spec, sizes, heads = call.spec, call.sizes, call.spec.kv_num_heads
    query, key, _ = _mapped(b, call, inputs)
    if sizes.key_heads != heads:
        key = _repeat(b, key, sizes.key_heads, heads, sizes.d_k)
    stored = b.Mul(_split(b, key, heads, sizes.d_k), _split(b, inputs[2], heads, 1))
    key = _pack(b, stored, heads * sizes.d_k)
    past = inputs[3] and b.Squeeze(inputs[3], b.const([3]))
    kernel = _Kernel(b, ONNX_RUNTIME, spec, heads, sizes.d_k, query, key, "")
    output, state = kernel.denominator(past)
    normalizer = b.const(np.zeros((1, heads, sizes.d_k), np.float32))
    output = b.CastLike(_pack(b, output, spec.output_heads), query)
    return [output, b.Unsqueeze(state, b.const([3])), normalizer]


@dataclass(frozen=True)
class _Kernel:
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
            key = _repeat(b, key, self.key_heads, heads, d_k)
        if spec.q_num_heads < heads:
            query = _repeat(b, query, spec.q_num_heads, heads, d_k)
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
            products = _split(b, b.Mul(query, sums), heads, d_k)
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
        split = _split(b, output, self.spec.output_heads, width)
        first, second, axis = b.const([0]), b.const([1]), b.const([3])
        return (
            b.Slice(b.Cast(split, to=TensorProto.FLOAT), first, second, axis),
            b.Squeeze(b.Slice(state, first, second, axis), axis),
        )


def _split(b: Body, packed: str, heads: int, width: int) -> str:
    """(B, T, H*d) as (B, T, H, d); also for T = 0, so the width is given."""
    return str(b.Reshape(packed, b.const([0, 0, heads, width])))


def _pack(b: Body, split: str, width: int) -> str:
    return str(b.Reshape(split, b.const([0, 0, width])))


def _pad_heads(b: Body, packed: str, heads: int, width: int, padded: int) -> str:
    pads = b.const([0, 0, 0, 0, 0, 0, 0, padded - width])
    return _pack(b, b.Pad(_split(b, packed, heads, width), pads), heads * padded)


def _cut_heads(b: Body, packed: str, heads: int, width: int, padded: int) -> str:
    if width == padded:
        return packed
    split = _split(b, packed, heads, padded)
    cut = b.Slice(split, b.const([0]), b.const([width]), b.const([3]))
    return _pack(b, cut, heads * width)


def _repeat(b: Body, packed: str, heads: int, served: int, width: int) -> str:
    index = b.const(np.repeat(np.arange(heads), served // heads))
    return _pack(b, b.Gather(_split(b, packed, heads, width), index, axis=2), served * width)


def native_conv(node: Node, dialect: Dialect = ONNX_RUNTIME) -> tuple[Body, list[str]]:
    """The kernel's CausalConvWithState, which has our definition."""
    b = Body()
    inputs = list(node.inputs)
    while not inputs[-1]:
        inputs.pop()
    outputs = b.node(
        causal_conv.OP.name,
        *inputs,
        outputs=2,
        domain=dialect.domain,
        activation=causal_conv.activation_of(node),
    )
    return b, list(outputs)
