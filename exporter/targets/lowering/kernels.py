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

from linexport.plugins.ops import causal_conv
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import (
    INPUTS,
    AbsorbedMap,
    LinearAttentionSpec,
    absorbed_map,
    view,
)
from linexport.plugins.ops.linear_attention.spec import AttentionSizes
from linexport.plugins.ops.op import Node
from linexport.targets.lowering import gated_delta_net
from linexport.targets.lowering.native_kernel import (
    KEY_MULTIPLE,
    ONNX_RUNTIME,
    VALUE_MULTIPLE,
    Dialect,
    NativeKernel,
    cut_heads,
    pack_heads,
    pad_heads,
    repeat_heads,
    split_heads,
)
from linexport.targets.lowering.token_blocks import blocked

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

    A zero key channel is zero in the state, and a zero value channel is cut off again.
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


def _called(b: Body, call: _KernelCall, inputs: Sequence[str], dialect: Dialect) -> _Called:
    """Call the kernel on heads as wide as it is to see them; the state is cut again."""
    spec, sizes, (d_k, d_v) = call.spec, call.sizes, call.padded
    _, _, value, past_state, past_normalizer, _, beta, _ = inputs
    query, key, decay = _mapped(b, call, inputs)
    heads = spec.kv_num_heads
    if not dialect.shares_keys:
        if sizes.key_heads != heads:
            key = repeat_heads(b, key, sizes.key_heads, heads, sizes.d_k)
        if spec.q_num_heads < heads:
            query = repeat_heads(b, query, spec.q_num_heads, heads, sizes.d_k)
        spec = replace(spec, q_num_heads=spec.output_heads)
        sizes = replace(sizes, key_heads=heads)
    if d_k != sizes.d_k:
        query = pad_heads(b, query, spec.q_num_heads, sizes.d_k, d_k)
        key = pad_heads(b, key, sizes.key_heads, sizes.d_k, d_k)
        if sizes.decay_per_channel:
            decay = pad_heads(b, decay, heads, sizes.d_k, d_k)
    if d_v != sizes.d_v:
        value = pad_heads(b, value, heads, sizes.d_v, d_v)
    if past_state and (d_k, d_v) != (sizes.d_k, sizes.d_v):
        pads = [0, 0, 0, 0, 0, 0, d_k - sizes.d_k, d_v - sizes.d_v]
        past_state = b.Pad(past_state, b.const(pads))
    if past_normalizer and d_k != sizes.d_k:
        past_normalizer = b.Pad(past_normalizer, b.const([0, 0, 0, 0, 0, d_k - sizes.d_k]))

    kernel = NativeKernel(b, dialect, spec, sizes.key_heads, d_k, query, key, decay)
    if dialect.splits_heads:
        seen = replace(sizes, d_k=d_k, d_v=d_v)
        given = (query, key, value, past_state, decay, beta)
        output, state = gated_delta_net.call(b, spec, seen, given, dialect.ends)
    else:
        output, state = kernel.call(value, past_state, beta)
    if (d_k, d_v) != (sizes.d_k, sizes.d_v):
        state = b.Slice(state, b.const([0, 0]), b.const([sizes.d_k, sizes.d_v]), b.const([2, 3]))
    return _Called(kernel, output, state, past_normalizer)


@dataclass(frozen=True)
class _Called:
    """The kernel on padded heads, its output (float32 unless it mixes types), and the state."""

    kernel: NativeKernel
    output: str
    state: str
    past_normalizer: str


def _native(b: Body, call: _KernelCall, inputs: Sequence[str], dialect: Dialect) -> list[str]:
    """Output, state and normalizer."""
    spec, sizes, (d_k, d_v) = call.spec, call.sizes, call.padded
    called = _called(b, call, inputs, dialect)
    kernel, output, state = called.kernel, called.output, called.state
    heads, query = spec.kv_num_heads, inputs[0]
    if not spec.normalize:
        output = b.CastLike(output, query)
        normalizer = b.const(np.zeros((1, heads, sizes.d_k), np.float32))
        return [cut_heads(b, output, spec.output_heads, sizes.d_v, d_v), state, normalizer]

    denominator, normalizer = kernel.denominator(called.past_normalizer)
    # Without an axis of one value, along which ONNX Runtime would add value by value.
    packed = b.Add(pack_heads(b, denominator, spec.output_heads), b.const(spec.eps))
    denominator = split_heads(b, packed, spec.output_heads, 1)
    split = split_heads(b, output, spec.output_heads, d_v)
    ratio = b.Div(b.Cast(split, to=TensorProto.FLOAT), denominator)
    output = pack_heads(b, b.CastLike(ratio, query), spec.output_heads * d_v)
    if d_k != sizes.d_k:
        normalizer = b.Slice(normalizer, b.const([0]), b.const([sizes.d_k]), b.const([2]))
    return [cut_heads(b, output, spec.output_heads, sizes.d_v, d_v), state, normalizer]


def native_columns(
    node: Node, d_k: int, multiple: int = 1, dialect: Dialect = ONNX_RUNTIME
) -> tuple[Body, list[str]]:
    """The kernel called once, the normaliser as one more column of the values.

        v' = [v, 1, 0 ...],  S' = [S, z, 0 ...],  o = (q . S) / (q . z)

    Args:
        node: causal, without a decay in two factors.
        d_k: width that keys are padded to.
        multiple: values are padded to one of it.
        dialect: the operator.
    """
    b, call = Body(), _KernelCall.of(node)
    inputs = list(node.inputs[: len(INPUTS)])
    spec, width = call.spec, call.sizes.d_v
    if spec.normalize:
        inputs[2] = _with_ones(b, inputs[2], spec.kv_num_heads, width)
        inputs[3:5] = _with_normalizer(b, inputs[3], inputs[4]), ""
        plain = replace(spec, normalize=False)
        call = replace(call, spec=plain, sizes=replace(call.sizes, d_v=width + 1))
    d_v = -(-call.sizes.d_v // multiple) * multiple
    called = _called(b, replace(call, padded=(d_k, d_v)), inputs, dialect)
    heads, query = spec.output_heads, inputs[0]
    if not spec.normalize:
        normalizer = b.const(np.zeros((1, spec.kv_num_heads, call.sizes.d_k), np.float32))
        output = cut_heads(b, b.CastLike(called.output, query), heads, width, d_v)
        return b, [output, called.state, normalizer]
    split, first, last = split_heads(b, called.output, heads, d_v), b.const([0]), b.const([width])
    after, axis = b.const([width + 1]), b.const([3])
    denominator = b.Add(b.Slice(split, last, after, axis), b.const(spec.eps))
    ratio = b.Div(b.Slice(split, first, last, axis), denominator)
    output = pack_heads(b, b.CastLike(ratio, query), heads * width)
    state = b.Slice(called.state, first, last, axis)
    return b, [output, state, b.Squeeze(b.Slice(called.state, last, after, axis), axis)]


def _with_ones(b: Body, value: str, heads: int, width: int) -> str:
    """Values (B, T, H * d) with a one behind those of each head, in float32."""
    split = split_heads(b, b.Cast(value, to=TensorProto.FLOAT), heads, width)
    shape = b.Concat(b.Shape(value, start=0, end=2), b.const([heads, 1]), axis=0)
    ones = b.Expand(b.const(1.0), shape)
    return pack_heads(b, b.Concat(split, ones, axis=3), heads * (width + 1))


def _with_normalizer(b: Body, state: str, normalizer: str) -> str:
    """Join the two states, where there is a past."""
    if not state:
        return ""
    return str(b.Concat(state, b.Unsqueeze(normalizer, b.const([3])), axis=3))


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
        key = repeat_heads(b, key, sizes.key_heads, heads, sizes.d_k)
    stored = b.Mul(split_heads(b, key, heads, sizes.d_k), split_heads(b, inputs[2], heads, 1))
    key = pack_heads(b, stored, heads * sizes.d_k)
    past = inputs[3] and b.Squeeze(inputs[3], b.const([3]))
    kernel = NativeKernel(b, ONNX_RUNTIME, spec, heads, sizes.d_k, query, key, "")
    output, state = kernel.denominator(past)
    normalizer = b.const(np.zeros((1, heads, sizes.d_k), np.float32))
    output = b.CastLike(pack_heads(b, output, spec.output_heads), query)
    return [output, b.Unsqueeze(state, b.const([3])), normalizer]


def native_conv(
    node: Node, dialect: Dialect = ONNX_RUNTIME, wide: bool = False
) -> tuple[Body, list[str]]:
    """The kernel's CausalConvWithState, which has our definition; called in float32 if ``wide``."""
    b = Body()
    inputs = list(node.inputs)
    while not inputs[-1]:
        inputs.pop()
    if wide:
        inputs = [x and b.Cast(x, to=TensorProto.FLOAT) for x in inputs]
    outputs = b.node(
        causal_conv.OP.name,
        *inputs,
        outputs=2,
        domain=dialect.domain,
        activation=causal_conv.activation_of(node),
    )
    return b, [b.CastLike(x, node.inputs[0]) if wide else x for x in outputs]
