"""The portable lowering of LinearAttention with ``causal = 0``: two matrix products.

    S = K^T V      z = K^T 1      O = s Q S / (s Q z + eps)

In memory and time linear in the number of queries and of keys. The scale is put on S and z, which
are small. Narrow heads are computed with channels before tokens, so that rows are long:

    O^T = s S^T Q^T / (s z^T Q^T + eps)      both products in one, [S^T; z^T] Q^T

Where the node applies a map whose kernel is kappa(q . k), K_1 the first ``DIRECT`` keys and K_2 the
others:

    O = kappa(Q K_1^T) V_1 + phi(Q) phi(K_2)^T V_2      V with a last column of ones, for z

A kernel such as (q . k)^2 may be far below |q|^2 |k|^2, of which the products of features are sums:
over a few keys they would lose their digits, over many the kernel is not small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap
from linexport.plugins.ops.linear_attention.cut import value_columns
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec

NARROW = 32
"""Widest head computed with channels before tokens. In ONNX Runtime on two cores that takes 0.46 of
the time at 8, 0.78 at 16, 0.97 to 1.04 at 32 (where transposes of users who have that layout, too,
cancel), and 1.24 at 64."""


DIRECT = 64
"""Keys whose weights are computed from scores."""


def write(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: Sequence[str],
    phi: AbsorbedMap | None = None,
) -> list[str]:
    """Append output, state and normalizer computed from the op's eight inputs.

    ``inputs`` are the eight formal names in order, "" for an absent one; ``phi`` is the map that
    the node applies to query and key.
    """
    query, key, value, *_, key_mask = inputs
    query_f, key_f, value_f = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value))
    if phi is not None and phi.formulas.kappa is not None:
        of = (query_f, key_f, value_f, key_mask)
        output, S, z = _by_kappa(b, spec, sizes, of, phi)
        return [b.CastLike(output, query), S, z]
    if phi is not None:
        query_f = phi.apply_packed(b, "query", query_f, spec.q_num_heads)
        key_f = phi.apply_packed(b, "key", key_f, sizes.key_heads)
    if key_mask:
        key_f = b.Where(b.Unsqueeze(key_mask, b.const([2])), key_f, b.const(0.0))
    narrow = max(sizes.d_k, sizes.d_v) <= NARROW
    split = _channels_first if narrow else _tokens_first
    q = split(b, query_f, spec.q_num_heads, sizes.d_k)
    q = _repeat(b, q, spec.q_num_heads, spec.output_heads)
    k = _channels_first(b, key_f, sizes.key_heads, sizes.d_k)
    k = _repeat(b, k, sizes.key_heads, spec.kv_num_heads)
    v = split(b, value_f, spec.kv_num_heads, sizes.d_v)
    z = b.ReduceSum(k, b.const([3]), keepdims=1)
    product = _narrow if narrow else _wide
    output, S = product(b, spec, sizes, (q, k, v, z))
    return [b.CastLike(output, query), S, b.Squeeze(z, b.const([3]))]


def _by_kappa(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    of: tuple[str, str, str, str],
    phi: AbsorbedMap,
) -> tuple[str, str, str]:
    """Packed output, S and z of packed query, key and value, and the mask of keys or ""."""
    query, key, value, key_mask = of
    q = _repeat(
        b, _tokens_first(b, query, spec.q_num_heads, phi.width), spec.q_num_heads, spec.output_heads
    )
    k = _repeat(
        b, _tokens_first(b, key, sizes.key_heads, phi.width), sizes.key_heads, spec.kv_num_heads
    )
    v = _tokens_first(b, value, spec.kv_num_heads, sizes.d_v)
    ones = b.Expand(b.const(1.0), b.Concat(b.Shape(v, end=-1), b.const([1]), axis=0))
    v = b.Concat(v, ones, axis=-1)
    if key_mask:  # a key without a value counts neither above nor below
        v = b.Where(b.Unsqueeze(key_mask, b.const([1, 3])), v, b.const(0.0))
    place, axis = b.const([DIRECT]), b.const([2])
    (k_1, v_1), (k_2, v_2) = (
        [b.Slice(x, start, end, axis) for x in (k, v)]
        for start, end in ((b.const([0]), place), (place, b.const([np.iinfo(np.int64).max])))
    )
    swapped = [0, 1, 3, 2]
    before, after = (
        b.MatMul(b.Transpose(phi.apply(b, "key", x), perm=swapped), y)
        for x, y in ((k_1, v_1), (k_2, v_2))
    )
    # ONNX Runtime leaves a sum over no tokens undefined.
    some = b.Greater(b.Shape(k_2, start=2, end=3), b.const([0]))
    after = b.Where(some, after, b.const(0.0))
    k_1, v_1, S = (_repeat(b, x, spec.kv_num_heads, spec.output_heads) for x in (k_1, v_1, after))
    weights = phi.kappa(b, b.MatMul(q, b.Transpose(k_1, perm=swapped)))
    sums = b.Add(b.MatMul(weights, v_1), b.MatMul(phi.apply(b, "query", q), S))
    if spec.scale != 1.0:
        sums = b.Mul(sums, b.const(float(spec.scale)))
    output, denominator = value_columns(b, sums, sizes)
    if spec.normalize:
        output = b.Div(output, b.Add(denominator, b.const(float(spec.eps))))
    output = b.Transpose(output, perm=[0, 2, 1, 3])
    output = b.Reshape(output, b.const([0, 0, spec.output_heads * sizes.d_v]))
    S, z = value_columns(b, b.Add(before, after), sizes)
    return output, S, b.Squeeze(z, b.const([3]))


def _wide(
    b: Body, spec: LinearAttentionSpec, sizes: AttentionSizes, of: tuple[str, str, str, str]
) -> tuple[str, str]:
    """Packed output and S of q and v (B, H, T, d), k (B, H, d, T) and z (B, H, d, 1)."""
    q, k, v, z = of
    S = b.MatMul(k, v)
    S_q, z_q = (_for_queries(b, spec, x) for x in (S, z))
    output = b.MatMul(q, S_q)
    if spec.normalize:
        output = b.Div(output, b.Add(b.MatMul(q, z_q), b.const(float(spec.eps))))
    output = b.Transpose(output, perm=[0, 2, 1, 3])
    return b.Reshape(output, b.const([0, 0, spec.output_heads * sizes.d_v])), S


def _narrow(
    b: Body, spec: LinearAttentionSpec, sizes: AttentionSizes, of: tuple[str, str, str, str]
) -> tuple[str, str]:
    """Packed output and S, as of ``_wide``, from q and v (B, H, d, T)."""
    q, k, v, z = of
    swapped = [0, 1, 3, 2]
    S = b.MatMul(v, b.Transpose(k, perm=swapped))
    # ONNX Runtime 1.31 fuses the two, and then leaves a sum over no tokens undefined.
    some = b.Greater(b.Shape(k, start=3, end=4), b.const([0]))
    S = b.Where(some, S, b.const(0.0))
    if spec.normalize:
        both = b.Concat(S, b.Transpose(z, perm=swapped), axis=2)
        output, denominator = b.Split(
            b.MatMul(_for_queries(b, spec, both), q), b.const([sizes.d_v, 1]), outputs=2, axis=2
        )
        output = b.Div(output, b.Add(denominator, b.const(float(spec.eps))))
    else:
        output = b.MatMul(_for_queries(b, spec, S), q)
    output = b.Reshape(output, b.const([0, spec.output_heads * sizes.d_v, 1, 0]))
    output = b.Transpose(b.Squeeze(output, b.const([2])), perm=[0, 2, 1])
    return output, b.Transpose(S, perm=swapped)


def _tokens_first(b: Body, packed: str, heads: int, width: int) -> str:
    """(B, T, heads * width) as (B, heads, T, width)."""
    # Zeros in a Reshape copy the batch and the length.
    split = b.Reshape(packed, b.const([0, 0, heads, width]))
    return str(b.Transpose(split, perm=[0, 2, 1, 3]))


def _channels_first(b: Body, packed: str, heads: int, width: int) -> str:
    """(B, T, heads * width) as (B, heads, width, T)."""
    # The length has to be where it is copied to.
    columns = b.Unsqueeze(b.Transpose(packed, perm=[0, 2, 1]), b.const([2]))
    return str(b.Reshape(columns, b.const([0, heads, width, 0])))


def _repeat(b: Body, x: str, heads: int, served: int) -> str:
    """(B, heads, ...) with each head repeated for those it serves."""
    if heads == served:
        return x
    return str(b.Gather(x, b.const(np.repeat(np.arange(heads), served // heads)), axis=1))


def _for_queries(b: Body, spec: LinearAttentionSpec, state: str) -> str:
    """A state times the scale, for every query head."""
    scaled = state if spec.scale == 1.0 else str(b.Mul(state, b.const(float(spec.scale))))
    return _repeat(b, scaled, spec.kv_num_heads, spec.output_heads)
